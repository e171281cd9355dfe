"""This machine, or several started by hand: ranks that `python train.py`, spawn/fork or `fabric run` started.

Knows its place from the variables of our own launchers or from `become`. Never sets os.environ.
"""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError, LaunchError
from fabric.plugins.environments.cluster_environment import ClusterEnvironment, open_store, port_taken
from fabric.plugins.environments.detect import batch_script
from fabric.utilities.rank_zero import rank_zero_warn
from fabric.utilities.warnings import PossibleUserWarning

if TYPE_CHECKING:
    from torch.distributed import Store

LAUNCHED = "FABRIC_LAUNCHED"
"""Set in ranks that we started: "script" or "cli"."""
STORE_FD = "FABRIC_STORE_FD"
"""Set in rank zero under `fabric run`: the file descriptor of a socket that already listens."""

# Ranks of a job open stores in the same order: equal numbers meet, stale keys of earlier groups do not.
_openings = itertools.count()
# A forked child must not destroy the store it inherits: that joins a thread which only the parent has.
_inherited: list[Any] = []


class LocalEnvironment(ClusterEnvironment):
    """Processes on this machine, started by us, or on several with `fabric run --num-nodes`."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}
        self._address: str | None = None
        self._port: int | None = None
        self._child = False
        self._listener: socket.socket | None = None
        self._store: Store | None = None
        self._owner = os.getpid()

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process is one of the ranks already, so that nothing is left to start."""
        return self._child or LAUNCHED in os.environ or "LOCAL_RANK" in os.environ

    @property
    def main_address(self) -> str:
        """MASTER_ADDR, else this machine."""
        return self._address or os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port of the store; a process that nobody launched opens one (raises like `host_store`)."""
        if self._port is not None:
            return self._port
        if (port := _int_variable("MASTER_PORT")) is not None:
            return port
        return self.host_store(timedelta(minutes=5))

    @staticmethod
    def detect() -> bool:
        """Always: this is what remains when no cluster is found."""
        return True

    def world_size(self) -> int:
        """Number of processes of the job."""
        return self._read("WORLD_SIZE", 1)

    def set_world_size(self, size: int) -> None:
        """Take the number of processes of the job."""
        self._place["WORLD_SIZE"] = size

    def global_rank(self) -> int:
        """Index of this process in the job."""
        return self._read("RANK", 0)

    def set_global_rank(self, rank: int) -> None:
        """Take the index of this process in the job."""
        self._place["RANK"] = rank

    def local_rank(self) -> int:
        """Index of this process on its machine."""
        return self._read("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Index of this machine: NODE_RANK or GROUP_RANK."""
        return self._read("NODE_RANK", _int_variable("GROUP_RANK") or 0)

    def local_world_size(self) -> int | None:
        """Number of processes on this machine, once launched."""
        return self._read("LOCAL_WORLD_SIZE", 0) or None

    def num_nodes(self) -> int | None:
        """Number of machines, once launched."""
        local = self.local_world_size()
        return self.world_size() // local if local else None

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what `fabric run` started, or what SLURM would start, with what the script asks for.

        Raises:
            ConfigurationError: The numbers of processes differ, or nobody starts those of other machines.
        """
        started = _int_variable("WORLD_SIZE")
        asked = num_devices * num_nodes
        if LAUNCHED in os.environ and started is not None and started != asked:
            raise ConfigurationError(
                f"devices={num_devices} x num_nodes={num_nodes} asks for {asked} processes, but the launcher "
                f'started WORLD_SIZE={started}. Write devices="auto" in the script, or start it with '
                f"`fabric run --devices {num_devices} --num-nodes {num_nodes}`."
            )
        if not self.creates_processes_externally:
            _check_allocation(num_devices, num_nodes)

    def become(
        self,
        local_rank: int,
        world_size: int,
        local_world_size: int,
        main_address: str,
        main_port: int,
        node_rank: int = 0,
        child: bool = True,
    ) -> None:
        """Take the place that a launcher assigned; `child`: this process did not start the others."""
        self._place = {
            "RANK": node_rank * local_world_size + local_rank,
            "LOCAL_RANK": local_rank,
            "NODE_RANK": node_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": local_world_size,
        }
        self._address, self._port, self._child = main_address, main_port, child
        if child:
            self._forget_store()

    def follow(self, other: LocalEnvironment) -> None:
        """Take the place and the hosted store of `other`, which was launched before in this process."""
        self._place, self._address, self._port = dict(other._place), other._address, other._port
        self._child, self._store, self._owner = other._child, other._store, other._owner

    def check_meeting_point(self, num_nodes: int) -> None:
        """Whether each of several machines knows where they all meet, before any of them starts ranks.

        Raises:
            LaunchError: MASTER_ADDR or MASTER_PORT is missing.
        """
        if num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            raise LaunchError(
                f"num_nodes={num_nodes} needs MASTER_ADDR and MASTER_PORT (of the first machine) and "
                "NODE_RANK in the environment of each machine. Set them, or use `fabric run --num-nodes "
                f"{num_nodes} --node-rank N --main-address HOST`, or torchrun."
            )

    def take_port(self, num_nodes: int = 1) -> int:
        """Listen at the port of the store to come, and return it: who connects waits for `host_store`.

        Args:
            num_nodes: With more than one it listens on all interfaces, else on the loopback only.

        Raises:
            LaunchError: The user's MASTER_PORT is taken.
            ConfigurationError: MASTER_PORT is no port number.
        """
        if self._port is None or (self._store is None and self._listener is None):
            wanted = _int_variable("MASTER_PORT") or 0
            self._listener = listen(self.main_address, wanted, everywhere=num_nodes > 1)
            self._port = int(self._listener.getsockname()[1])
        return self._port

    def host_store(self, timeout: timedelta, num_nodes: int = 1) -> int:
        """Host the store of the job in this process and return its port; a second call returns the same port.

        Args:
            timeout: Default of each later wait on the store.
            num_nodes: As in `take_port`, which also says what is raised.
        """
        port = self.take_port(num_nodes)
        if self._listener is not None:
            # The store takes the descriptor over: the port is ours before anyone hears of it.
            descriptor, self._listener = self._listener.detach(), None
            self._store = open_store(self.main_address, port, True, 1, timeout, listen_fd=descriptor)
        return port

    def make_store(self, rank: int, world_size: int, timeout: timedelta) -> Store:
        """The hosted store in the hosting process, else a connection to it (raises as the base does)."""
        from torch.distributed import PrefixStore

        from fabric.processes.lifeline import tie_to_parent

        tie_to_parent()
        if self._store is None and rank == 0 and not self._child:
            self._host_as_rank_zero(world_size, timeout)
        store = self._store
        if store is None:
            store = open_store(self.main_address, self.main_port, False, world_size, timeout)
        store.set_timeout(timeout)
        return PrefixStore(f"fabric{next(_openings)}", store)

    def teardown(self) -> None:
        """Close the store, if this process hosts it and no other environment shares it."""
        self._forget_store()

    def _host_as_rank_zero(self, world_size: int, timeout: timedelta) -> None:
        handed = _int_variable(STORE_FD)
        if handed is not None and handed not in _handed_over:
            self._store = open_store(self.main_address, self.main_port, True, world_size, timeout, handed)
            _handed_over[handed] = self._store
        elif handed is not None:
            self._store = _handed_over[handed]
        else:
            self.host_store(timeout, num_nodes=self.num_nodes() or 1)

    def _forget_store(self) -> None:
        if self._store is not None and self._owner != os.getpid():
            _inherited.append(self._store)
        if self._listener is not None:
            self._listener.close()
        self._store = self._listener = None

    def _read(self, name: str, default: int) -> int:
        if name in self._place:
            return self._place[name]
        value = _int_variable(name) if self.creates_processes_externally or name == "NODE_RANK" else None
        return default if value is None else value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None, "_listener": None}


def _check_allocation(num_devices: int, num_nodes: int) -> None:
    """Say so where a job of SLURM has more than the one process that it started here will use."""
    environ = os.environ
    if "SLURM_JOB_ID" not in environ:
        return
    how = (
        "Write `srun python train.py` (one process for each task), or `srun --ntasks-per-node 1 torchrun "
        "...` (see fabric/plugins/environments/README.md)"
    )
    if num_nodes > 1 and not {"MASTER_ADDR", "NODE_RANK"} <= set(environ):
        raise ConfigurationError(
            f"num_nodes={num_nodes} asks for processes on other machines, but this one was started once, in "
            f"SLURM job {environ['SLURM_JOB_ID']} without srun, and nothing starts the others. {how}, or "
            "num_nodes=1 to run on this machine alone."
        )
    tasks, nodes = _int_variable("SLURM_NTASKS") or 1, _int_variable("SLURM_NNODES") or 1
    if batch_script(environ) and num_nodes == 1 and (nodes > 1 or tasks > num_devices):
        rank_zero_warn(
            f"SLURM job {environ['SLURM_JOB_ID']} has SLURM_NTASKS={tasks} on SLURM_NNODES={nodes}, but its "
            f"batch script started this process itself, without srun: devices={num_devices} x num_nodes=1 "
            f"run on this machine alone. {how}, or ask sbatch for less.",
            category=PossibleUserWarning,
        )


LightningEnvironment = LocalEnvironment
"""Lightning's name for it."""

# Rank zero under `fabric run` opens the socket it was handed once; its later groups share that store.
_handed_over: dict[int, Any] = {}


def listen(address: str, port: int, everywhere: bool = False) -> socket.socket:
    """A socket that listens on `port` (0: the kernel chooses) of `address`, or of all interfaces.

    Raises:
        ConfigurationError: It is no port number.
        LaunchError: The port is taken.
    """
    where = "" if everywhere or address not in ("127.0.0.1", "localhost") else "127.0.0.1"
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"port {port} is not in 0..65535. Write 0 for a free one.")
    try:
        return socket.create_server((where, port), backlog=4096)
    except OSError as error:
        if port:
            raise port_taken(address, port) from error
        raise LaunchError(f"This machine gives no port to listen on: {error}.") from error


def _int_variable(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"The environment variable {name}={text!r} must be a whole number. Unset it or correct it."
        ) from None
