"""``plimsoll demo``: a leak, its incident and its cure, with clients that watch every token.

command (the order of events) <- streams (clients), evidence (pure: what happened to figures),
story, picture, report.
"""
