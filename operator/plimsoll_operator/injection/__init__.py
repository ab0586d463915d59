"""Inject a supervisor into pods of other workloads, in pure functions.

``documents`` injects a supervisor into a manifest for ``plimsoll inject``, and ``policy`` into a
pod for the admission webhook. Both find the engine with ``engine``, check the pod with ``checks``
and add the supervisor with ``sidecar``. ``options`` contains the settings, in the types of a
SupervisionPolicy. ``pods`` finds the pod specs in each kind, and ``kserve_llm`` handles a kind
without pod specs.
"""
