"""`check_strategy`: tests a strategy on real ranks against plain torch, for authors of strategies."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ArgumentTypeError, ConfigurationError, ContractError, RankError
from fabric.fabric import Fabric
from fabric.resolve import AutoStrategy, requested_strategy
from fabric.testing.failures import RankFailure
from fabric.testing.pool import RankPool
from fabric.testing.promises import OVERRIDABLE, PROMISES, PromiseBroken, overrides_take_effect

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.strategies.strategy import Strategy


def check_strategy(
    strategy: str | Callable[[], Strategy],
    *,
    accelerator: str = "cpu",
    devices: int = 2,
    pool: RankPool | None = None,
    timeout: float = 60.0,
) -> None:
    """Check a strategy against every promise of `PROMISES`, and report all broken ones at once.

    A strategy that needs no launch is checked on one rank, with `devices` devices if it splits data over them
    and with one if not. The pool starts the processes, so strategies that differ only in their launcher give
    the same result.

    Args:
        strategy: A registered name; or a class or function, at the top level of a module, that returns one.
        accelerator: As in `Fabric`.
        devices: Number of ranks, or of devices of one rank, 2 or more.
        pool: Warm ranks of this accelerator; None: a new pool.
        timeout: Seconds for each promise; a promise that takes longer is broken.

    Raises:
        ConfigurationError: The ranks of `pool` are for another accelerator.
        ContractError: Promises are broken; the message names each with its failure.
    """
    traits = _make(strategy).traits
    ranks = devices if traits.needs_launch else 1
    devices = devices if traits.needs_launch or traits.data_parallel else 1
    if pool is not None and pool.accelerator != accelerator:
        raise ConfigurationError(
            f"The ranks of this pool use accelerator={pool.accelerator!r}, but the strategy is checked on "
            f"{accelerator!r}. Write RankPool(accelerator={accelerator!r}), or leave pool= out."
        )
    with nullcontext(pool) if pool is not None else RankPool(ranks, timeout, accelerator=accelerator) as used:
        broken = {
            promise.__name__: error
            for promise in PROMISES
            if (error := _try(used, promise, strategy, accelerator, (ranks, devices), timeout)) is not None
        }
    if broken:
        name = strategy if isinstance(strategy, str) else getattr(strategy, "__name__", repr(strategy))
        details = "\n".join([f"- {promise}: {error}" for promise, error in broken.items()])
        raise ContractError(
            f"strategy {name!r} on {devices} x {accelerator} breaks {len(broken)} of {len(PROMISES)} "
            f"promises (each is a function in fabric/testing/promises.py):\n{details}"
        )


def _try(
    pool: RankPool,
    promise: Callable[..., None],
    strategy: str | Callable[[], Strategy],
    accelerator: str,
    size: tuple[int, int],
    timeout: float,
) -> str | None:
    """Return the failure of the first rank that has one; None: the promise is kept."""
    with tempfile.TemporaryDirectory(prefix="fabric-contract-") as folder:
        arguments = (promise.__name__, strategy, accelerator, size[1], folder)
        try:
            pool.run(run_promise, *arguments, world_size=size[0], timeout=timeout)
        except RankFailure as failure:
            if not failure.exceptions:
                return f"did not end within {timeout:g} s\n{failure}"
            rank, error = next(iter(failure.exceptions.items()))
            # A RankError has the text of an exit, or of an exception that does not pickle.
            kind = "" if isinstance(error, PromiseBroken | RankError) else f"{type(error).__name__}: "
            return f"rank {rank}: {kind}{error}"
    return None


def run_promise(name: str, strategy: Any, accelerator: str, devices: int, folder: str) -> None:
    """Run one promise on this rank of a pool."""
    promise = next(promise for promise in PROMISES if promise.__name__ == name)
    made = _make(strategy)
    if promise is overrides_take_effect:
        made.__class__ = _recording_class(type(made))
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=made)
    fabric.launch()
    try:
        promise(fabric, Path(folder))
    finally:
        fabric.strategy.teardown()


def _make(strategy: str | Callable[[], Strategy]) -> Strategy:
    """Return a new strategy; for a name, the one that `Fabric` creates.

    Raises:
        ConfigurationError: Nothing is registered under the name.
        ArgumentTypeError: The result is not a strategy, or the name is "auto".
    """
    made = requested_strategy(strategy if isinstance(strategy, str) else strategy())
    if isinstance(made, AutoStrategy):
        raise ArgumentTypeError(
            'strategy="auto" means one of several strategies. Check each by its own name.'
        )
    return made


def _recording_class(kind: type[Strategy]) -> type[Strategy]:
    """Return a subclass whose overrides record their calls in `seen`."""

    def recorded(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.seen.add(name)
            return getattr(super(made, self), name)(*args, **kwargs)

        return method

    made: Any = type(f"Overridden{kind.__name__}", (kind,), {name: recorded(name) for name in OVERRIDABLE})
    made.seen = set()
    return made  # type: ignore[no-any-return]
