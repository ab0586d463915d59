"""Evaluates pods, incidents and Leases for the services and policies. Pure functions.

Controllers and the circuit breaker act on the results.
"""
