"""Commands that use a cluster, and a client of the API server."""
