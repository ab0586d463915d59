"""Local mode: run the engine and the supervisor of a manifest as child processes.

``plan`` and ``model`` decide what to run. ``container`` runs one process. ``runner`` starts and
stops the engine and the supervisor in the order of a pod. ``status`` polls them for ``view``.
"""
