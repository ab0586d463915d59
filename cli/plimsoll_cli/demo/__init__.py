"""``plimsoll demo``: a leak, its incident and its cure, with clients that watch every token.

command (a clean run, then the leaky one) -> scene (clients, recorder, live view) -> evidence (pure:
what was seen to figures and verdict) -> report (story, picture, files).
"""
