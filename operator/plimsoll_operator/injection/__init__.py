"""A supervisor for pods that something else makes: pure functions, no cluster, no files.

documents injects a manifest, for ``plimsoll inject``, and policy a pod, for the admission webhook.
Both find the engine with engine, check the pod with checks and add the supervisor with sidecar.
options says what is wanted, in the types of a SupervisionPolicy; pods says where a kind keeps its
pod specs; kserve_llm is for a kind that has none.
"""
