"""What a service or a policy should have: pure functions from specs and observed objects."""
