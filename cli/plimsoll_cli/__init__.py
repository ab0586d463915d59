"""The command-line program ``plimsoll``, which is also the kubectl plugin ``kubectl plimsoll``."""
