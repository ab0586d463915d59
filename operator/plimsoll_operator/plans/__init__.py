"""Plan the objects that a service or policy needs.

The functions are pure: they use only the spec and the observed state.
"""
