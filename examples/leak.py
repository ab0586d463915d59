"""A program that leaks 4 MiB a second for two minutes: see docs/quickstart.md."""

import time

kept = []
for _ in range(120):
    kept.append(b"x" * (4 << 20))
    time.sleep(1)
