"""Admission webhook that adds supervisors to new pods. Every replica of the operator serves it.

``review`` chooses a pod's policy and builds the response, ``configuration`` builds the
MutatingWebhookConfiguration, and ``certificate`` issues the server's certificate. These three
modules do no I/O. ``upkeep`` keeps the configuration and the certificate up to date, and ``server``
serves the API server's requests.
"""
