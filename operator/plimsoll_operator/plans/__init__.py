"""Plan the objects that a service or policy should have.

The functions are pure: they depend only on the spec and the observed state.
"""
