"""Compare secrets in constant time."""

from __future__ import annotations

import hmac
import secrets
from hashlib import blake2b


class Secret:
    """Secret that is stored and compared as a keyed digest.

    ``hmac.compare_digest`` alone would reveal the length of the secret.
    """

    _key = secrets.token_bytes(32)

    def __init__(self, value: bytes) -> None:
        self._digest = self.digest(value)

    @classmethod
    def digest(cls, value: bytes) -> bytes:
        """Return the 32-byte digest of ``value`` under this process's random key."""
        return blake2b(value, key=cls._key, digest_size=32).digest()

    def is_equal(self, value: bytes) -> bool:
        """Report whether ``value`` is the secret, in constant time."""
        return hmac.compare_digest(self._digest, self.digest(value))
