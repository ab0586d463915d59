"""``plimsoll demo``: a leak, its incident and its cure, while clients stream tokens."""
