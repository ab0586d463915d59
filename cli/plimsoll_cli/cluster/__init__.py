"""Commands about a cluster. client talks to the API server, the others decide and print."""
