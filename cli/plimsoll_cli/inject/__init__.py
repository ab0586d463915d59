"""``plimsoll inject``: a supervisor for pods that something else makes. YAML in, YAML out.

The operator's package adds the supervisor; selection chooses documents, command reads and writes
files.
"""
