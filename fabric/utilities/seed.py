"""Seeds and states of the global random generators of python, numpy and torch, on every device.

Called by users, `Fabric` and data workers. Never changes generator objects that users created.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.lazy import lazy_names
from fabric.core.messages import show
from fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__getattr__ = lazy_names(__name__)

SEED_VARIABLE = "FABRIC_GLOBAL_SEED"
WORKERS_VARIABLE = "FABRIC_SEED_WORKERS"

_MAX_SEED = 2**32 - 1  # the limit of numpy's legacy generator
_PYTHON, _NUMPY, _TORCH = 1, 2, 3  # one salt per library, so that their streams are unrelated


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed python, numpy and torch (all devices) in this process; a variable passes the seed to children.

    Args:
        seed: 0 to 2**32 - 1. None: `FABRIC_GLOBAL_SEED`, else 0.
        workers: Whether dataloader workers get `pl_worker_init_function` (kept in `FABRIC_SEED_WORKERS`).
        verbose: Log the seed on rank zero.

    Returns:
        The seed that was used.

    Raises:
        ConfigurationError: The seed, or the one in the environment, is not an integer in range.
    """
    if seed is None:
        value = _checked_seed(os.environ.get(SEED_VARIABLE, "0"), SEED_VARIABLE)
    else:
        value = _checked_seed(seed, "seed")
    os.environ[SEED_VARIABLE] = str(value)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    if verbose:
        rank_zero_info("Seed set to %d", value)
    _seed_libraries(value, value, value)
    return value


def reset_seed() -> None:
    """Repeat the last `seed_everything` of this process or its parent; without one, do nothing."""
    if SEED_VARIABLE in os.environ:
        seed_everything(workers=os.environ.get(WORKERS_VARIABLE, "0") == "1", verbose=False)


def seed_rank(seed: int, rank: int) -> int:
    """Give this rank separate streams, derived from the common `seed`, which stays in the environment.

    Returns:
        The 64-bit seed of this rank.
    """
    base = derive_seed(seed, rank)
    seed_streams(base)
    return base


def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a dataloader worker: streams are unique over rank, worker, epoch and library.

    Pass `functools.partial(pl_worker_init_function, rank=rank)` as `worker_init_fn`: a spawned worker has no
    other source of its rank. The epoch enters through torch, which draws a new base seed for every pass.

    Args:
        worker_id: Number of the worker among those of its loader, from 0.
        rank: Global rank of the process; None: `rank_zero_only.rank`.
    """
    rank = rank_zero_only.rank if rank is None else rank
    # torch seeds worker k with base + k: worker 1 of one pass could otherwise equal worker 0 of another.
    base = torch.initial_seed() - worker_id
    seed_streams(derive_seed(base, worker_id, rank))


def derive_seed(base: int, *salts: int) -> int:
    """Return a 64-bit seed, a function of `base` and `salts` that is the same on all machines and Pythons."""
    text = ",".join(str(int(number)) for number in (base, *salts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def collect_rng_states() -> dict[str, Any]:
    """Return the states of all generators of this process, in types of `torch.load(weights_only=True)`.

    numpy is included if it is imported, an accelerator if it is initialised: this creates no context.
    """
    states = host_states()
    name, module = _accelerator()
    if module is not None and getattr(module, "is_initialized", module.is_available)():
        get_all = getattr(module, "get_rng_state_all", None)
        states[f"torch.{name}"] = module.get_rng_state() if get_all is None else get_all()
    return states


def host_states() -> dict[str, Any]:
    """Return the part of `collect_rng_states` that is not on an accelerator."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := loaded_numpy()) is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), int(position), int(has_gauss), float(gauss))
    return states


def loaded_numpy() -> Any:
    """Return numpy if it is imported, else None."""
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "random") else None


def set_rng_states(states: dict[str, Any]) -> None:
    """Restore the result of `collect_rng_states`, also of another process or from a file."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(states["torch"].cpu())
    if "numpy" in states and (numpy := _numpy()) is not None:
        numpy.random.set_state(tuple(states["numpy"]))
    for key, state in states.items():
        kind = key.removeprefix("torch.")
        if kind != key and isinstance(state, list):
            _set_states(kind, state)
        elif kind != key and (module := getattr(torch, kind, None)) is not None and module.is_available():
            module.set_rng_state(state.cpu())


class RngState:
    """Random states of all ranks, as one entry of a checkpoint. Created by `fabric.rng_state()`.

    Args:
        rank: The rank of this process.
        exchange: Gathers a value from all ranks; None: there is one rank.
    """

    def __init__(self, rank: int, exchange: Callable[[Any], list[Any]] | None) -> None:
        self.rank = rank
        self.exchange = exchange

    def state_dict(self) -> dict[str, Any]:
        """The states of python's, numpy's and torch's generators on every rank. All ranks must call this."""
        local = collect_rng_states()
        return {"ranks": [local] if self.exchange is None else self.exchange(local)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore this rank's random streams.

        With more ranks than were saved, the new ranks get separate streams if the saved ranks had them, else
        the common one.

        Raises:
            ArgumentTypeError: Not a result of `state_dict()`.
        """
        ranks = state_dict.get("ranks") if isinstance(state_dict, dict) else None
        if not isinstance(ranks, list) or not ranks:
            raise ArgumentTypeError(
                f"The random state of a checkpoint is what fabric.rng_state() saves, but got a "
                f'{type(state_dict).__name__}. Write fabric.save(path, {{"rng": fabric.rng_state()}}).'
            )
        set_rng_states(ranks[self.rank % len(ranks)])
        if self.rank >= len(ranks) and not all([torch.equal(r["torch"], ranks[0]["torch"]) for r in ranks]):
            rank_zero_warn(
                f"The random states of {len(ranks)} ranks were saved: higher ranks start new random streams.",
            )
            seed_rank(int(torch.randint(2**62, ())), self.rank)


@contextmanager
def isolate_rng() -> Iterator[None]:
    """Context that restores the states of all generators, whatever the block draws or seeds."""
    states = collect_rng_states()
    name, module = _accelerator()
    untouched = module is not None and f"torch.{name}" not in states and module.is_available()
    seed = torch.initial_seed()
    try:
        yield
    finally:
        set_rng_states(states)
        # Unused generators have the state of the seed. Also undoes a seed that torch sets at initialisation.
        if untouched:
            module.manual_seed_all(seed)


def _checked_seed(given: Any, source: str) -> int:
    try:
        value = int(given)
        valid = (isinstance(given, str) or value == given) and 0 <= value <= _MAX_SEED
    except (TypeError, ValueError, OverflowError):
        valid = False
    if not valid:
        raise ConfigurationError(
            f"{source}={show(given)} is not a seed. Write an integer from 0 to {_MAX_SEED}, for example "
            "seed_everything(42)."
        )
    return value


def seed_streams(base: int) -> None:
    """Seed each library of this process with a separate stream, a function of `base`."""
    _seed_libraries(
        derive_seed(base, _PYTHON), derive_seed(base, _NUMPY) & _MAX_SEED, derive_seed(base, _TORCH)
    )


def _seed_libraries(python: int, numpy: int, torch_: int) -> None:
    random.seed(python)
    if (module := _numpy()) is not None:
        module.random.seed(numpy)
    torch.manual_seed(torch_)  # all devices; torch seeds the others at their initialisation


def _numpy() -> Any:
    # Imported if necessary: otherwise numpy would be unseeded after a later `import numpy`.
    if "numpy" not in sys.modules and find_spec("numpy") is None:
        return None
    return import_module("numpy")


def _accelerator() -> tuple[str, Any]:
    """Return the type and module of torch's accelerator in this build; ("", None): it has none."""
    current = torch.accelerator.current_accelerator()
    return ("", None) if current is None else (current.type, torch.get_device_module(current))


def _set_states(kind: str, states: list[torch.Tensor]) -> None:
    module = getattr(torch, kind, None)
    count = 0 if module is None else module.device_count()
    if count < len(states):
        rank_zero_warn(
            f"The saved {kind} random states are of {len(states)} devices, but this process sees {count}: "
            f"the random streams of the missing ones are not restored."
        )
    for index, state in enumerate(states[:count]):
        module.set_rng_state(state.cpu(), index)  # type: ignore[union-attr]
