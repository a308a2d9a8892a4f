"""The keys by which members know samples; each proves that its member was given the sample.

A coordinator that was started again knows nothing of the calls that a member has kept, and learns of them from the
member's ``Hello``. No member may obtain a sample by saying that it holds a call of it: which member decodes what is the
coordinator's decision, and only members that passed the log-prob check are given samples. ``Assign`` therefore names
a sample by a key that only the coordinator can make, and an offer is believed if it repeats that key.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from hashlib import sha256

_SEAL_BYTES = 16


class SampleKeys:
    """Seals sample keys for members, and opens what they repeat.

    Args:
        secret: known to the coordinators of one run alone.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sealed(self, member: str, sample_key: str) -> str:
        """Return the key by which ``member`` knows a sample."""
        code = hmac.digest(self._secret, f"{member}\0{sample_key}".encode(), sha256)[:_SEAL_BYTES]
        return f"{sample_key}~{urlsafe_b64encode(code).decode().rstrip('=')}"

    def opened(self, member: str, sealed: str) -> str | None:
        """Return the sample key that ``member`` knows as ``sealed``; ``None`` if it was never given that."""
        sample_key = sealed.rpartition("~")[0]
        expected = self.sealed(member, sample_key)
        return sample_key if hmac.compare_digest(expected.encode(), sealed.encode()) else None
