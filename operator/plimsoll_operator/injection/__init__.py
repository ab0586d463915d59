"""Inject a supervisor into pods of other workloads, in pure functions.

``documents`` serves ``plimsoll inject``, and ``policy`` serves the admission webhook.
"""
