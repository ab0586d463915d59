"""Admission of pods that a SupervisionPolicy selects: every replica of the operator serves it.

policies chooses a pod's policy, review answers a request, configuration says which pods the API
server asks about, certificate makes the server's certificate; these are pure. upkeep keeps them
current, server serves.
"""
