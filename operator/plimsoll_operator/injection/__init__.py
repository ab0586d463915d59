"""Injection of a supervisor into pods of other workloads: pure functions, no cluster, no files.

``documents`` injects a manifest for ``plimsoll inject``, and ``policy`` injects a pod for the
admission webhook. Both find the engine with ``engine``, check the pod with ``checks`` and add the
supervisor with ``sidecar``. ``options`` holds the settings, in the types of a SupervisionPolicy;
``pods`` knows where a kind keeps its pod specs; ``kserve_llm`` is for a kind that has none.
"""
