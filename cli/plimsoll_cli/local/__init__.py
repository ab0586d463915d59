"""Local mode: run the engine and the supervisor of a manifest as child processes."""
