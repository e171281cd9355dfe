"""`JobSecret`: the key that ranks of a job authenticate each other with. Imports no torch at the top.

A launcher creates it, and ranks inherit it as FABRIC_JOB_SECRET. Without that variable ranks agree on one
through the store of the process group: any process that can connect to the store can read it.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "FABRIC_JOB_SECRET"
_KEY = "fabric/job-secret"
_inherited: JobSecret | None = None
_of_groups: WeakKeyDictionary[Any, JobSecret] = WeakKeyDictionary()


class JobSecret:
    """Signs messages between the ranks of one job (HMAC-SHA256)."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def proof(self, *parts: bytes) -> bytes:
        """Return 32 bytes that only a process with the secret can compute from these parts."""
        text = b"".join([b"%d:%b" % (len(part), part) for part in parts])
        return hmac.digest(self._value, text, "sha256")

    def signature(self, data: Any) -> bytes:
        """Return the signature of a message, without copying it."""
        return hmac.digest(self._value, data, "sha256")

    def sign(self, key: str, text: str) -> str:
        """Return `text` with a signature that is valid for this key of the store only."""
        return f"{self.proof(key.encode(), text.encode()).hex()} {text}"

    def verified(self, key: str, data: bytes) -> str | None:
        """Return the text of `data`, a result of `sign`; None: the signature is invalid."""
        signature, _, text = data.partition(b" ")
        expected = self.proof(key.encode(), text).hex().encode()
        return text.decode() if hmac.compare_digest(signature, expected) else None


def new_secret(inherited: Mapping[str, str]) -> str:
    """Return FABRIC_JOB_SECRET of a scheduler, or 32 random bytes, for the ranks of a new job."""
    return inherited.get(VARIABLE) or secrets.token_hex(32)


def pop_inherited_secret() -> JobSecret | None:
    """Return FABRIC_JOB_SECRET, and remove it from the environment that child processes inherit."""
    global _inherited
    if value := os.environ.pop(VARIABLE, ""):
        _inherited = JobSecret(value.encode())
    return _inherited


def secret_of(store: Any) -> JobSecret:
    """Return the inherited secret, or the first one that a rank wrote to `store`."""
    if (inherited := pop_inherited_secret()) is not None:
        return inherited
    return JobSecret(bytes(store.compare_set(_KEY, "", secrets.token_hex(32))))


def secret_of_world() -> JobSecret:
    """Return the secret of torch's default process group."""
    from torch import distributed

    world: Any = distributed.group.WORLD if distributed.is_initialized() else None
    if world is None:
        return pop_inherited_secret() or JobSecret(b"no process group")
    if world not in _of_groups:
        _of_groups[world] = secret_of(world.get_group_store())
    return _of_groups[world]
