"""`JobSecret`: the secret of a job, by which its ranks recognise each other. Imports no torch at the top.

A launcher makes it, and ranks inherit it as FABRIC_JOB_SECRET. Where nothing was inherited, ranks agree on
one through the store of the process group: whoever can connect to that store can read it.
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
        """Return 32 bytes that only an owner of the secret can compute from these parts."""
        text = b"".join([b"%d:%b" % (len(part), part) for part in parts])
        return hmac.digest(self._value, text, "sha256")

    def signature(self, data: Any) -> bytes:
        """Return the signature of a message, without copying it."""
        return hmac.digest(self._value, data, "sha256")

    def sign(self, key: str, text: str) -> str:
        """Return `text` with a signature that holds under this key of the store only."""
        return f"{self.proof(key.encode(), text.encode()).hex()} {text}"

    def verified(self, key: str, data: bytes) -> str | None:
        """Return the text that `sign` was given; None: a process without the secret wrote `data`."""
        mark, _, text = data.partition(b" ")
        right = self.proof(key.encode(), text).hex().encode()
        return text.decode() if hmac.compare_digest(mark, right) else None


def new_secret(inherited: Mapping[str, str]) -> str:
    """Return FABRIC_JOB_SECRET of a scheduler, or 32 random bytes, for the ranks of a new job."""
    return inherited.get(VARIABLE) or secrets.token_hex(32)


def take_inherited() -> JobSecret | None:
    """Remove FABRIC_JOB_SECRET from the environment, which children of this rank inherit; return it."""
    global _inherited
    if value := os.environ.pop(VARIABLE, ""):
        _inherited = JobSecret(value.encode())
    return _inherited


def secret_of(store: Any) -> JobSecret:
    """Return the inherited secret, or the first one that a rank has put into `store`."""
    if (inherited := take_inherited()) is not None:
        return inherited
    return JobSecret(bytes(store.compare_set(_KEY, "", secrets.token_hex(32))))


def secret_of_world() -> JobSecret:
    """Return the secret of torch's default process group."""
    from torch import distributed

    world: Any = distributed.group.WORLD if distributed.is_initialized() else None
    if world is None:
        return take_inherited() or JobSecret(b"no process group")
    if world not in _of_groups:
        _of_groups[world] = secret_of(world.get_group_store())
    return _of_groups[world]
