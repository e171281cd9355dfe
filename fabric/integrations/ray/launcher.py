"""`RayLauncher`: runs a function on actors of one placement group; on fewer of them after a node was lost."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fabric.core.errors import LaunchError, RankError
from fabric.integrations.ray.rank_assignment import RankAssignment
from fabric.launch.launcher import Launcher
from fabric.launch.stores import reserve_port

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class RankActor:
    """Actor that runs one rank."""

    def where(self) -> tuple[str, str]:
        """Return the node's id and address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def listen(self, address: str) -> int:
        """Reserve and return the port for the store of all ranks."""
        return reserve_port(address, 0, one_interface=True)

    def run(self, assignment: RankAssignment, call: tuple[Any, Callable[..., Any], Any, Any]) -> Any:
        """Set up the environment for `assignment`, and run the function, whose Fabric has this strategy."""
        strategy, function, args, kwargs = call
        variables = {
            "RANK": assignment.rank,
            "WORLD_SIZE": assignment.world_size,
            "LOCAL_RANK": assignment.local_rank,
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        strategy.cluster_environment.assign(assignment)
        strategy.num_nodes = assignment.nodes
        strategy.parallel_devices = [strategy.parallel_devices[0]] * assignment.local_size
        result = function(*args, **kwargs)
        return result if assignment.rank == 0 else None


class RayLauncher(Launcher):
    """Starts the ranks as actors, waits for them, and kills them in the end.

    Args:
        environment: A `RayEnvironment`, with the resources of each rank.
        strategy: The strategy, which is sent to the actors with the function.
    """

    start_method = "ray"

    def __init__(self, environment: Any, strategy: Any) -> None:
        self.environment, self.strategy = environment, strategy

    def launch(self, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` in every actor; return rank zero's result.

        Raises:
            LaunchError: There is no function; the cluster lacks resources; or a rank failed, whose exception
                is in the `RayTaskError` that is the cause.
        """
        if function is None:
            raise LaunchError(
                "Actors of Ray run a function, but launch() got none. Move the loop into a function, "
                "`def main(fabric): ...`, and call `fabric.launch(main)`."
            )
        initialised_here = not ray.is_initialized()
        if initialised_here:
            ray.init(**{"include_dashboard": False, "logging_level": "ERROR", **self.environment.init})
        try:
            return self._until_done(function, args, kwargs)
        finally:
            if initialised_here:
                ray.shutdown()

    def _until_done(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        count = self.strategy.num_processes * self.strategy.num_nodes
        least = min(count, self.environment.min_workers or count)
        failures = 0
        while True:
            try:
                return self._attempt(count, failures > 0, function, args, kwargs)
            except LaunchError as error:
                room, cause = self._room(), error.__cause__
                if isinstance(cause, RayActorError) and failures < self.environment.max_failures:
                    failures += 1
                elif not (isinstance(cause, GetTimeoutError) and least <= room < count):
                    raise
                count = max(least, min(count, room))
                _log.warning("%s Beginning anew with %d ranks.", error, count)

    def _attempt(self, count: int, again: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        group = placement_group([self._share()] * count, strategy=self.environment.placement)
        actors: list[Any] = []
        try:
            self._await_room(group, count, again)
            kind = ray.remote(RankActor)
            for index in range(count):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                settings = self.environment
                actors.append(
                    kind.options(
                        num_cpus=settings.cpus,
                        num_gpus=self._gpus(),
                        resources=settings.resources,
                        scheduling_strategy=place,
                    ).remote()
                )
            return self._run(actors, function, args, kwargs)
        finally:
            for actor in actors:
                with suppress(Exception):
                    ray.kill(actor)
            remove_placement_group(group)

    def _run(self, actors: list[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        ranks: dict[Any, int] = {}
        try:
            places = ray.get([actor.where.remote() for actor in actors])
            address = places[0][1]
            port = ray.get(actors[0].listen.remote(address))
            nodes = [node for node, _ in places]
            call = ray.put((self.strategy, function, args, kwargs))  # in one pickle: they may share objects
            order = list(dict.fromkeys(nodes))
            for rank, (actor, node) in enumerate(zip(actors, nodes, strict=True)):
                assignment = RankAssignment(
                    rank, len(actors), nodes[:rank].count(node), nodes.count(node),
                    order.index(node), len(order), address, port,
                )  # fmt: skip
                ranks[actor.run.remote(assignment, call)] = rank
            waiting = list(ranks)
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1)
                if error := _error_of(done[0]):
                    raise error
            return ray.get(next(iter(ranks)))
        except (RayTaskError, RayActorError) as error:
            # Other ranks may report the failure of a rank before its own error is received.
            ended, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=2) if ranks else ([], [])
            errors = {ranks[call]: failure for call in ended if (failure := _error_of(call))}
            first = min(errors, key=lambda rank: (_is_secondary(errors[rank]), rank), default=None)
            cause = error if first is None else errors[first]
            who = "a rank" if first is None else f"rank {first} of {len(ranks)}"
            what = getattr(cause, "cause", None) or cause
            raise LaunchError(f"{who} failed: {type(what).__name__}: {what}") from cause

    def _share(self) -> dict[str, float]:
        share = {"CPU": self.environment.cpus, "GPU": self._gpus(), **self.environment.resources}
        return {name: amount for name, amount in share.items() if amount}

    def _gpus(self) -> float:
        own = self.environment.gpus
        return own if own is not None else float(self.strategy.parallel_devices[0].type == "cuda")

    def _room(self) -> int:
        """Return the number of ranks that live nodes have resources for."""
        available = ray.cluster_resources()
        return min([int(available.get(name, 0) / amount) for name, amount in self._share().items()])

    def _await_room(self, group: Any, count: int, again: bool) -> None:
        """Wait for resources; after a failure (`again`) stop once the cluster reports a lost node."""
        seconds = self.environment.startup_seconds
        start = time.monotonic()
        while True:
            try:
                ray.get(group.ready(), timeout=min(1.0, seconds))
                return
            except GetTimeoutError as error:
                waited = time.monotonic() - start
                if waited < seconds and not (again and self._room() < count):
                    continue
                each = ", ".join([f"{amount:g} {name}" for name, amount in self._share().items()])
                raise LaunchError(
                    f"The Ray cluster had no room for {count} ranks ({each} each) in {waited:.0f} s: it has "
                    f"{ray.cluster_resources()}. Ask for fewer devices=, or for less for each by "
                    "RayEnvironment(cpus=...)."
                ) from error


def _error_of(call: Any) -> Any:
    try:
        ray.get(call)
    except (RayTaskError, RayActorError) as error:
        return error
    return None


def _is_secondary(error: Any) -> bool:
    """Whether an error is only the consequence of another rank's failure."""
    cause = getattr(error, "cause", None)
    return isinstance(cause, RankError) or "onnection closed by peer" in str(cause)
