"""Token of an engine's admin API, in a file that the supervisor and the engine share.

This module has few imports, because the supervisor's launcher uses it.
"""

from __future__ import annotations

import contextlib
import os

from plimsoll_api.names import TOKEN_FILE


def write_token(run_dir: str) -> bool:
    """Write a random token with mode 0600, unless a token exists. Return whether it was written.

    Concurrent calls agree on one token. Raises OSError.
    """
    path = os.path.join(run_dir, TOKEN_FILE)
    if os.path.exists(path):
        if os.path.getsize(path) > 0:
            return False
        os.unlink(path)
    temporary = f"{path}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, os.urandom(32).hex().encode())
        os.fsync(descriptor)
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return True
