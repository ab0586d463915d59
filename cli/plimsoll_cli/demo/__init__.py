"""``plimsoll demo``: a leak, its incident and its cure, while clients stream tokens.

``command`` runs the service without and with the leak. ``scene`` runs clients, recorder and live
view. ``evidence`` computes the figures, and ``story`` and ``picture`` write the report.
"""
