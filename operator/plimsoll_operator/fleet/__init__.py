"""What pods, incidents and Leases mean for the services and policies. Pure functions.

Controllers and the circuit breaker act on the results.
"""
