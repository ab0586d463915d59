"""The status of an InferenceService: pure functions from observed objects."""
