"""``plimsoll inject``: supervisors for pods that other tools create. YAML in, YAML out.

The operator's package adds the supervisor. ``command`` selects documents, and reads and writes
files.
"""
