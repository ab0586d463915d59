"""Plan the objects that a service or policy needs, in pure functions."""
