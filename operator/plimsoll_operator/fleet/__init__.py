"""Evaluate the pods, incidents and Leases of services and policies, in pure functions.

The controllers act on the results.
"""
