"""Local mode: the manifest's engine and supervisor as child processes on this machine.

``plan`` and ``model`` decide what to run, ``container`` runs one process, and ``runner`` runs both
in a pod's order. ``status`` polls them for ``view``.
"""
