"""The status of InferenceServices and SupervisionPolicies: pure functions from observed objects."""
