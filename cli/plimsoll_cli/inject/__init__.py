"""``plimsoll inject``: add supervisors to workloads that other tools create.

:mod:`plimsoll_operator.injection` adds a supervisor to an object. ``command`` selects the objects
of a file, and ``edit`` changes the text of the file.
"""
