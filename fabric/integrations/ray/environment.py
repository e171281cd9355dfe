"""`RayEnvironment`: ranks are actors of a Ray cluster that run a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError
from fabric.core.extras import import_package
from fabric.integrations.ray.rank_assignment import RankAssignment
from fabric.plugins.environments.cluster_environment import ClusterEnvironment

if TYPE_CHECKING:
    from fabric.launch.launcher import Launcher


class RayEnvironment(ClusterEnvironment):
    """`Fabric(plugins=RayEnvironment(), accelerator="cpu", devices=2)`, then `fabric.launch(function)`.

    `devices=` times `num_nodes=` is the number of ranks; Ray places them. With `accelerator="cuda"` each rank
    has one GPU; the driver, which calls `launch`, needs none.

    Args:
        cpus: Number of the cluster's CPUs per rank.
        gpus: Number of GPUs per rank; None: one with accelerator="cuda", else none.
        resources: Further resources per rank, by Ray's names.
        placement: Ray's placement strategy: "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD".
        min_workers: Smallest number of ranks, for a cluster with fewer resources or after a node was lost;
            None: the requested number. The function is then run again from its start, so it should begin
            with `fabric.load_latest(...)`.
        max_failures: Number of restarts after an actor or its node was lost.
        startup_seconds: Seconds to wait for resources for all ranks.
        init: Keyword arguments of `ray.init`, if Ray is not initialised in this process.

    Raises:
        ConfigurationError: `min_workers` is less than 1, or `max_failures` negative.
        MissingExtraError: Ray is not installed.
    """

    remote_ranks = True

    def __init__(
        self,
        cpus: float = 1,
        gpus: float | None = None,
        resources: dict[str, float] | None = None,
        placement: str = "PACK",
        min_workers: int | None = None,
        max_failures: int = 0,
        startup_seconds: float = 120.0,
        init: dict[str, Any] | None = None,
    ) -> None:
        if (min_workers is not None and min_workers < 1) or max_failures < 0:
            raise ConfigurationError(
                f"RayEnvironment(min_workers={min_workers}, max_failures={max_failures}): a run has 1 rank "
                "or more, and fails 0 times or more."
            )
        import_package("ray", "RayEnvironment", "ray", least="2.40")
        self.cpus, self.gpus, self.resources, self.placement = cpus, gpus, resources or {}, placement
        self.min_workers, self.max_failures = min_workers, max_failures
        self.startup_seconds, self.init = startup_seconds, init or {}
        self._assignment = RankAssignment(0, 1, 0, 1, 0, 1, "", 0)

    def make_launcher(self, strategy: Any) -> Launcher | None:
        """Return the launcher of the actors, the ranks of `strategy`."""
        from fabric.integrations.ray.launcher import RayLauncher

        return RayLauncher(self, strategy)

    def assign(self, assignment: RankAssignment) -> None:
        """Set rank, sizes and store address to those of `assignment`; called in the actor."""
        self._assignment = assignment

    @property
    def creates_processes_externally(self) -> bool:
        """False: the launcher creates them."""
        return False

    @property
    def main_address(self) -> str:
        """The address of rank zero's node."""
        return self._assignment.address

    @property
    def main_port(self) -> int:
        """The port on which rank zero listens already."""
        return self._assignment.port

    @staticmethod
    def detect() -> bool:
        """False: it is used only if it is passed explicitly."""
        return False

    def world_size(self) -> int:
        """Number of actors."""
        return self._assignment.world_size

    def set_world_size(self, size: int) -> None:
        """Ignore `size`: the launcher sets it."""

    def global_rank(self) -> int:
        """Index of this actor."""
        return self._assignment.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore `rank`: the launcher sets it."""

    def local_rank(self) -> int:
        """Index of this actor on its node."""
        return self._assignment.local_rank

    def node_rank(self) -> int:
        """Index of this actor's node."""
        return self._assignment.node_rank

    def local_world_size(self) -> int | None:
        """Number of actors on this node."""
        return self._assignment.local_size

    def num_nodes(self) -> int | None:
        """Number of nodes with an actor."""
        return self._assignment.nodes
