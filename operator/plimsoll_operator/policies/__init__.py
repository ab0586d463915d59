"""SupervisionPolicies: which pods each of them has, what the operator makes for it, its status.

selection says whose a pod is, selected_pod what state it is in, workloads what owns it, render
which objects a policy has, rollout which workloads are restarted, suspicion which revisions leak,
limits what is too much, policy_status what its status says. All are pure.
"""
