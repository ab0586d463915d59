"""The admission webhook for pods that a SupervisionPolicy selects, served by every replica.

``review`` chooses a pod's policy and answers a request, ``configuration`` builds the
MutatingWebhookConfiguration, and ``certificate`` issues the server's certificate; these modules are
pure. ``upkeep`` keeps the configuration and the certificate up to date, and ``server`` answers
requests.
"""
