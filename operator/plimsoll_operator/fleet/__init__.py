"""Evaluate pods, incidents and Leases in pure functions; the controllers act on the results."""
