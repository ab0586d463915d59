"""The command line: ``plimsoll``, also found by kubectl as ``kubectl plimsoll``."""
