"""Local mode: runs the engine and the supervisor of a manifest as child processes.

``plan`` and ``model`` decide what to run, ``container`` runs one process, and ``runner`` runs both
in a pod's order. ``status`` polls them for ``view``.
"""
