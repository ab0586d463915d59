"""Plan the objects that a service or policy needs.

The functions are pure: they depend only on the spec and the observed state.
"""
