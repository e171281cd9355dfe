"""The ranks of `fabric doctor`: their rendezvous, and phases with a deadline on each rank.

All messages pass through the store of rank zero. So a rank or a device that hangs delays no other rank.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fabric.core.errors import LaunchError
from fabric.plugins.environments.rendezvous import ARRIVED
from fabric.tools.doctor.report import Reading, format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

    from fabric.plugins.environments.cluster_environment import ClusterEnvironment

GRACE_S = 5.0
"""Time limit of a message in seconds."""


class LostError(LaunchError):
    """This rank cannot report to rank zero, so it prints `row` itself."""

    def __init__(self, row: Reading) -> None:
        super().__init__(row.text)
        self.row = row


class DoctorJob:
    """The ranks that joined, and which of them respond.

    Args:
        environment: The environment of this process.
        about: Facts on this rank for the other ranks.
        timeout: Seconds for all ranks to arrive.

    Raises:
        LostError: Rank zero was not reached in time.
    """

    def __init__(self, environment: ClusterEnvironment, about: dict[str, Any], timeout: float) -> None:
        self.rank, self.world_size = environment.global_rank(), environment.world_size()
        self.alive, self.ranks = [*range(self.world_size)], dict[int, Any]()
        self.rows: list[Reading] = []
        self.hung = False
        """Whether a thread of this process is blocked, so that only os._exit ends the process."""
        self.store = _open_store(environment, self.rank, self.world_size, timeout)
        self.ranks = self.phase("arrival", lambda: about, timeout, share=True)

    @property
    def nodes(self) -> dict[int, str]:
        """Return the machine of each rank; empty if there is but one."""
        names = {rank: about["host"] for rank, about in self.ranks.items()}
        return names if len(set(names.values())) > 1 else {}

    def phase(self, name: str, run: Callable[[], Any], seconds: float, share: bool = False) -> dict[int, Any]:
        """Run a phase on all ranks and return the results by rank. All ranks must call this.

        Args:
            name: Name for findings: a rank that raises, or does not respond, is a FAIL.
            run: Function of each rank; its result is sent as JSON.
            seconds: Time limit. A rank that sends nothing in it is excluded from later phases.
            share: Whether all ranks get the results, not only rank zero.

        Raises:
            LostError: Rank zero does not respond, or has excluded this rank.
        """
        end = time.monotonic() + seconds + GRACE_S
        own = json.dumps(self._within(run, seconds))
        if self.rank:
            self.alive, shared = self._exchange(name, own, seconds + 3 * GRACE_S)
            return {int(rank): value for rank, value in shared.items()}
        self.store.set(f"doctor/{name}/0", own)
        results = self._collect(name, end)
        values = {rank: value for rank, (value, error) in results.items() if not error}
        if missing := [rank for rank in self.alive if rank not in results]:
            who = format_ranks(missing, self.nodes)
            text = f"no answer within {seconds:g} s in phase {name!r} from {who}"
            self.rows.append(Reading("answers", 0, text))
        for text in dict.fromkeys([error for _, error in results.values() if error]):
            who = format_ranks([rank for rank, (_, error) in results.items() if error == text], self.nodes)
            self.rows.append(Reading("errors", 0, f"{text} in phase {name!r}: {who}"))
        self.alive = sorted(results)
        self.store.set(f"doctor/{name}/alive", json.dumps([self.alive, values if share else {}]))
        return values

    def close(self) -> None:
        """On rank zero, which hosts the store: wait until no other rank needs it."""
        if self.rank:
            with suppress(RuntimeError):
                self.store.set(f"doctor/close/{self.rank}", "[0, 0]")
        else:
            self.alive.remove(0)
            self._collect("close", time.monotonic() + GRACE_S)

    def _within(self, run: Callable[[], Any], seconds: float) -> tuple[Any, str]:
        """Return the result of `run` and its error. After a timeout its thread continues."""
        results: list[tuple[Any, str]] = []

        def work() -> None:
            try:
                results.append((run(), ""))
            except Exception as error:  # each error of a network, disk or device is a finding
                results.append((None, f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(seconds)
        self.hung = self.hung or not results
        return results[0] if results else (None, f"no end within {seconds:g} s")

    def _collect(self, name: str, end: float) -> dict[int, tuple[Any, str]]:
        results = {}
        for rank in self.alive:
            key, left = f"doctor/{name}/{rank}", max(0.01, end - time.monotonic())
            with suppress(RuntimeError):
                self.store.wait([key], timedelta(seconds=left))
                results[rank] = json.loads(self.store.get(key))
        return results

    def _exchange(self, name: str, own: str, seconds: float) -> Any:
        """Send the result of this rank to rank zero and return its answer."""
        why = f"rank {self.rank} lost rank zero, or it did not answer within {seconds:g} s in phase {name!r}"
        with suppress(RuntimeError):
            self.store.set(f"doctor/{name}/{self.rank}", own)
            self.store.wait([f"doctor/{name}/alive"], timedelta(seconds=seconds))
            found = json.loads(self.store.get(f"doctor/{name}/alive"))
            if self.rank in found[0]:
                return found
            why = f"rank {self.rank} was too late for rank zero in phase {name!r}"
        raise LostError(Reading("answers", 0, why))


def _open_store(environment: ClusterEnvironment, rank: int, world_size: int, timeout: float) -> Store:
    try:
        store = environment.make_store(rank, world_size, timedelta(seconds=timeout))
        if rank:  # stores of torchrun wait for it
            store.set(f"{ARRIVED}/{rank}", "1")
            store.add(ARRIVED, 1)
        return store
    except RuntimeError as error:  # those of torch, and LaunchError
        cause, text = explain(environment.main_address, environment.main_port, rank, str(error))
        text = f"rank {rank} on {socket.gethostname()} did not join within {timeout:g} s: {text}"
        raise LostError(Reading(f"rendezvous, {cause}", 0, text)) from error


def explain(address: str, port: int, rank: int, error: str) -> tuple[str, str]:
    """Return the kind of the reason why the store at this address was not opened, and a text."""
    where = f"(MASTER_ADDR={address}, MASTER_PORT={port})"
    try:
        found = socket.getaddrinfo(address, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        if rank:
            socket.create_connection((address, port), timeout=GRACE_S).close()
        else:
            socket.create_server((found, 0)).close()
    except socket.gaierror as why:
        return "name", f"the name {address!r} does not resolve ({why.strerror})"
    except ConnectionRefusedError:
        return "refused", f"{found} refuses port {port} {where}"
    except OSError as why:
        if rank == 0:
            return "address", f"{found} is no address of this machine, which has rank 0 {where}"
        return "silent", f"{found} does not answer at port {port}: {why} {where}"
    return "other", f"{error.splitlines()[0]} {where}"
