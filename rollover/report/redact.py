"""Secrets do not leave the machine: they are blanked before a config is shown or sent anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|secret|secret_key|password|passwd|credentials?|authorization|private_key)$"
    r"|^token$|(^|_)(auth|access|hf|bearer|api|refresh)_?token$"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redacted(value: Any) -> Any:
    """``value`` (nested mappings, lists, scalars) with secret keys and logins inside URLs blanked."""
    if isinstance(value, Mapping):
        return {k: HIDDEN if v and _is_secret(str(k)) else redacted(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(v) for v in value]
    if isinstance(value, str):
        return _URL_LOGIN.sub(HIDDEN, value)
    return value


def _is_secret(key: str) -> bool:
    return _SECRET_KEY.search(key.lower().replace("-", "_")) is not None
