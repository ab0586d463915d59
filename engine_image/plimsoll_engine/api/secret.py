"""A secret that a client must know, compared in a time that tells nothing of it."""

from __future__ import annotations

import hmac
import secrets
from hashlib import blake2b


class Secret:
    """A secret, kept and compared as a digest under a key of this process.

    ``compare_digest`` alone ends at once where the lengths differ, which tells the length.
    """

    _key = secrets.token_bytes(32)

    def __init__(self, value: bytes) -> None:
        self._digest = self.digest(value)

    @classmethod
    def digest(cls, value: bytes) -> bytes:
        """Return the keyed digest that stands for ``value``, 32 bytes whatever its length."""
        return blake2b(value, key=cls._key, digest_size=32).digest()

    def equals(self, value: bytes) -> bool:
        """Whether ``value`` is the secret, in a time that depends on neither."""
        return hmac.compare_digest(self._digest, self.digest(value))
