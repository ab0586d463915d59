"""Commands about a cluster: a client of the API server, and the commands that use it."""
