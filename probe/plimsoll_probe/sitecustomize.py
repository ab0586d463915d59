"""Start the probe with the interpreter, and then run the next ``sitecustomize`` on the path.

The file is installed next to the package, in a folder on PYTHONPATH.
"""

import importlib.machinery
import importlib.util
import os
import sys

try:
    import plimsoll_probe

    plimsoll_probe.start()
except Exception:  # noqa: BLE001, S110 - the engine must not notice
    pass


# Python imports only the first ``sitecustomize`` on the path.
def _run_next_sitecustomize() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    others = [folder for folder in sys.path if os.path.realpath(folder) != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _run_next_sitecustomize()
