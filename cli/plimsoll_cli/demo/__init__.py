"""``plimsoll demo``: a leak, its incident and its cure, while clients stream tokens.

``command`` runs the service, first without and then with the leak. ``scene`` runs the clients, the
recorder and the live view. ``evidence`` computes the results. ``story`` and ``picture`` write the
report.
"""
