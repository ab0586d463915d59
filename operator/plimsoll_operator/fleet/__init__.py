"""Evaluate the pods, incidents and Leases of services and policies, in pure functions.

Controllers and the circuit breaker act on the results.
"""
