"""Names of the files through which the programs in the supervisor's container meet.

The launcher and ``ask`` import this module: it must stay small.
"""

RESET_FILE = "reset-restart-budget"
"""In the state directory: the supervisor resets its restart budget and removes the file."""
SOCKET = "ask.sock"
"""In the state directory: where the supervisor takes manual actions."""
