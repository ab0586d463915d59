"""Plans of the objects that a service or policy should have.

Pure functions of spec and observation.
"""
