"""One replica on this machine: the manifest's engine and supervisor as child processes.

plan (pure: manifest to commands) <- ports, model <- process, pod, runner (start, restart, stop).
"""
