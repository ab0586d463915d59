"""The admission webhook for pods that a SupervisionPolicy selects, served by every replica.

``review`` chooses a pod's policy and builds the response, ``configuration`` builds the
MutatingWebhookConfiguration, and ``certificate`` issues the server's certificate. These three
modules do no I/O. ``upkeep`` keeps the configuration and the certificate up to date, and ``server``
serves the API server's requests.
"""
