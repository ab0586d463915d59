"""``plimsoll inject``: add supervisors to workloads that other tools create.

The operator's package creates the supervisor. ``command`` selects documents, and reads and writes
files. ``edit`` changes a document's text.
"""
