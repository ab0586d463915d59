"""The admission webhook for pods that a SupervisionPolicy selects, served by every replica.

``review`` chooses a pod's policy and answers a request, ``configuration`` builds the
MutatingWebhookConfiguration, and ``certificate`` issues the server's certificate; these are pure.
``upkeep`` keeps configuration and certificate current, and ``server`` serves.
"""
