"""Admission webhook that adds supervisors to new pods; every replica of the operator serves it.

``review``, ``configuration`` and ``certificate`` do no I/O.
"""
