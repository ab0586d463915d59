"""One replica on this machine: the manifest's engine and supervisor as child processes.

plan (pure: manifest to commands), ports and model come first; container keeps one process running,
runner puts two of them in a pod's order, status asks them how they are, command is for a person.
"""
