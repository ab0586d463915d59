"""``plimsoll demo``: a leak, its incident and its cure, while clients stream tokens.

``command`` runs the service without and with the leak. ``scene`` runs the clients, the recorder and
the live view. ``evidence`` computes the results. ``story`` and ``picture`` write the report.
"""
