"""A supervisor for pods that something else makes: pure functions, no cluster, no files.

``plimsoll inject`` and the operator's admission webhook use the same ones. engine finds the
engine's container and what it runs, pods says where a kind keeps its pod spec, sidecar adds the
supervisor.
"""
