"""Build the status of InferenceServices and SupervisionPolicies, in pure functions."""
