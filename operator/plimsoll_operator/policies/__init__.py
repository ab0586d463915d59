"""SupervisionPolicies: which pods each of them has, what the operator makes for it, its status.

selection says whose a pod is, selected_pod what state it is in, render which objects a policy has,
policy_status what its status says. All are pure.
"""
