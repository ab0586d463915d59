"""Status of InferenceServices and SupervisionPolicies: pure functions of observed objects."""
