"""Evaluate pods, incidents and Leases for the services and policies, with pure functions.

Controllers and the circuit breaker act on the results.
"""
