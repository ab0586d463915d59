"""The tests of this folder share a model of an engine: ``governed.py``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
