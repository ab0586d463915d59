"""``plimsoll inject``: add supervisors to workloads that other tools create.

The operator's package :mod:`plimsoll_operator.injection` adds a supervisor to an object. Here,
``command`` selects the objects of a file, and ``edit`` changes the text of the file.
"""
