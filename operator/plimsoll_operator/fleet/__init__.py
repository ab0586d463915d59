"""Evidence over many replicas: bad revisions, the circuit breaker, what only pods tell.

Pure functions from observed objects; the controller and the breaker carry out what they say.
"""
