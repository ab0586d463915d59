"""``plimsoll inject``: a supervisor for pods that something else makes. YAML in, YAML out.

engine finds the engine's container and what it runs, pods says where a kind keeps its pod spec,
sidecar adds the supervisor to it (all three are pure), command reads and writes files.
"""
