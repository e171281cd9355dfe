"""A pretend accelerator for tests: device type "sim", several of them, in host memory; "simnccl" over gloo.

Importing this registers it with torch, and gives `torch.sim`; `sim_build` makes its compiled part, and
`sim_autoload` lets torch import it.

It shows: bytes and peaks per device; every place where the host waits for it (`HostSyncs`); tensors of
different devices mixed; memory that is read before it is written (NaN); random streams per device; ranks that
send over one transport what the other awaits on another. It cannot show: kernels, overlap, races of streams,
NCCL's treatment of NaN, time. All work is done when it is asked for, and `wait()` of its process group blocks
the host, which NCCL's does not.

Environment: SIM_DEVICES, how many devices there are (4); SIMNCCL_TIMEOUT, seconds after which an operation of
ranks is an error (20); SIMNCCL_EAGER=1: as NCCL with `device_id=`, one order for all operations of a group,
sends among them; SIM_BUILD, where the compiled part is kept.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import sim_build
import torch
import torch.distributed as dist

_sim = sim_build.load()


class Stream:
    """Makes a `torch.Stream` of a sim device. All work is done when it is asked for."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Any:
        return torch.Stream(device=_device(device), priority=priority)


class Event:
    """Makes a `torch.Event` of a sim device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Any:
        return torch.Event(device="sim", enable_timing=enable_timing, blocking=blocking)


def _device(device: Any = None) -> torch.device:
    if isinstance(device, int):
        return torch.device("sim", device)
    device = torch.device("sim" if device is None else device)
    return torch.device("sim", _sim.current_device()) if device.index is None else device


class _Module(ModuleType):
    """`torch.sim`, with the names that `torch.cuda` has."""

    Stream, Event = Stream, Event
    device_count = staticmethod(_sim.device_count)
    current_device = staticmethod(_sim.current_device)
    set_device = staticmethod(lambda device: _sim.set_device(_device(device).index))
    is_available = staticmethod(lambda: _sim.device_count() > 0)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    _lazy_init = init = staticmethod(lambda: None)
    empty_cache = staticmethod(lambda: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    is_bf16_supported = staticmethod(lambda: True)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(_device(device))

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_device(device))

    @staticmethod
    def default_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(stream_id=0, device_index=_device(device).index, device_type=20)

    @staticmethod
    def set_stream(stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    @staticmethod
    @contextmanager
    def stream(stream: torch.Stream | None) -> Any:
        if stream is None:
            yield
            return
        with stream:
            yield

    @staticmethod
    @contextmanager
    def device(device: Any) -> Any:
        old = _sim.current_device()
        _sim.set_device(_device(device).index)
        try:
            yield
        finally:
            _sim.set_device(old)

    @staticmethod
    def _generator(device: Any = "sim") -> torch.Generator:
        return _sim.default_generator(_device(device).index)

    @classmethod
    def get_rng_state(cls, device: Any = "sim") -> torch.Tensor:
        return cls._generator(device).get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor, device: Any = "sim") -> None:
        cls._generator(device).set_state(state)

    @classmethod
    def get_rng_state_all(cls) -> list[torch.Tensor]:
        return [cls.get_rng_state(i) for i in range(_sim.device_count())]

    @classmethod
    def set_rng_state_all(cls, states: Any) -> None:
        for i, state in enumerate(states):
            cls.set_rng_state(state, i)

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls._generator().manual_seed(int(seed))

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for i in range(_sim.device_count()):
            cls._generator(i).manual_seed(int(seed))

    @classmethod
    def initial_seed(cls) -> int:
        return cls._generator().initial_seed()

    memory_allocated = staticmethod(lambda device=None: _sim.memory(_device(device).index)[0])
    max_memory_allocated = staticmethod(lambda device=None: _sim.memory(_device(device).index)[1])
    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated
    reset_peak_memory_stats = staticmethod(lambda device=None: _sim.reset_peak(_device(device).index))
    get_device_name = staticmethod(lambda device=None: "pretend accelerator")


@contextmanager
def stalled() -> Any:
    """While entered, the devices of this process do nothing: who waits for one waits until the end."""
    _sim.stall(True)
    try:
        yield
    finally:
        _sim.stall(False)


class HostSyncs:
    """Where a real device would have made the host wait, in a `with` block: counts by kind and place.

    Attributes:
        kinds: How often each ("item", "copy to cpu", "copy from cpu", "nonzero", "synchronize device", ...).
        places: How often each (kind, "file:line of a caller in `of`").
    """

    def __init__(self, of: str = "") -> None:
        self.kinds: Counter[str] = Counter()
        self.places: Counter[tuple[str, str]] = Counter()
        self._of = of

    def _note(self, kind: str) -> None:
        self.kinds[kind] += 1
        frames = [
            f for f in traceback.extract_stack()[:-1] if self._of in f.filename and "<" not in f.filename
        ]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
        self.places[kind, place] += 1

    def __enter__(self) -> HostSyncs:
        _sim.on_sync(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        _sim.on_sync(None)


def _make_backend(options: Any, _: Any = None) -> Any:
    limit = float(os.environ.get("SIMNCCL_TIMEOUT", "20"))
    store, rank, size = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simnccl", store), rank, size, timedelta(seconds=limit))
    return _sim.make_backend(gloo, rank, size, limit, os.environ.get("SIMNCCL_EAGER") == "1")


def _let_parameters_move() -> None:
    """As on CUDA: `parameter.data = tensor_of_another_device`, by which `module.to` keeps its parameters.

    torch knows by heart which device types may do so, and PrivateUse1 is none of them.
    """
    plain, alike = torch._C.TensorBase.data, torch._has_compatible_shallow_copy_type

    def moves(old: Any, new: Any) -> bool:
        return {old.device.type, new.device.type} == {"cpu", "sim"} and type(old.data) is type(
            new.data
        ) is torch.Tensor

    def set_data(self: torch.Tensor, new: torch.Tensor) -> None:
        if moves(self, new):
            _sim.set_data(self, new)
        else:
            plain.__set__(self, new)

    torch.Tensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]

    def may_set(input, from_):  # type: ignore[no-untyped-def]  # torch.compile compares names and annotations
        return moves(input, from_) or alike(input, from_)

    may_set.__annotations__ = {"input": torch.Tensor, "from_": torch.Tensor, "return": bool}
    torch._has_compatible_shallow_copy_type = may_set


def _register() -> None:
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _Module("torch.sim"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    sys.modules.setdefault("torch.sim", torch.sim)
    _let_parameters_move()
    dist.Backend.register_backend("simnccl", _make_backend, extended_api=True, devices=["sim"])
    # To find a group's default backend torch compares the first name here, in upper case, with one in lower
    # case (2.13), and where there is none warns at the end of each group.
    dist.Backend._plugins = {"simnccl": dist.Backend._plugins["SIMNCCL"], **dist.Backend._plugins}


_register()
