"""What pods, incidents and Leases say, one by one and together. Pure functions.

Controllers and the circuit breaker act on the results.
"""
