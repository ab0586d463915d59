"""The abuser's process: plays one class against a replica and prints what it did.

python -m bench.abuse_play NAME SCENE-AS-JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from bench import abuse_bodies, abuse_connections, abuse_operations, abuse_tenants
from bench.abuse_scene import Class, Scene

CLASSES: dict[str, Class] = {
    **abuse_connections.CLASSES,
    **abuse_bodies.CLASSES,
    **abuse_tenants.CLASSES,
    **abuse_operations.CLASSES,
}

if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(CLASSES[sys.argv[1]](Scene(**json.loads(sys.argv[2])))))))
