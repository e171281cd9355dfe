"""`Registry`: names to factories, of strategies, accelerators, precisions and environments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from fabric.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered name: a factory, its keyword arguments, and a description."""

    factory: Callable[..., Any] | str
    description: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """Return the factory; import it if it was registered as "module:name"."""
        if not isinstance(self.factory, str):
            return self.factory
        module, _, name = self.factory.partition(":")
        factory: Callable[..., Any] = attrgetter(name)(import_module(module))
        return factory


class Registry:
    """A table of names. Other packages add theirs with `register` or with an entry point of `group`.

    Args:
        kind: The kind of registered object, for error messages ("strategy").
        group: Entry-point group that other distributions use, for example "fabric.strategies". An entry point
            loads to a factory (a class or function); its name is the registered name.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, Entry] = {}
        self._loaded = False

    def register(
        self,
        name: str,
        factory: Callable[..., Any] | str,
        description: str = "",
        override: bool = False,
        **defaults: Any,
    ) -> None:
        """Add a name.

        Args:
            name: The name that users write.
            factory: Class or function that creates the object, or its path, "module:name".
            description: One line of text.
            override: Whether to replace an existing entry.
            defaults: Keyword arguments of the factory.

        Raises:
            ConfigurationError: The name is taken and `override` is False.
        """
        if name in self._entries and not override:
            raise ConfigurationError(
                f"The {self.kind} name {name!r} is taken by {self._entries[name].factory!r}. "
                f"Choose another name, or pass override=True."
            )
        self._entries[name] = Entry(factory, description, dict(defaults))

    def get(self, name: str, **overrides: Any) -> Any:
        """Return a new object for `name`; `overrides` replace registered keyword arguments.

        Raises:
            ConfigurationError: `name` is unknown; the message has similar names.
        """
        entry = self.entry(name)
        return entry.load()(**{**entry.defaults, **overrides})

    def entry(self, name: str) -> Entry:
        """Return the entry that is registered under `name`.

        Raises:
            ConfigurationError: As for `get`.
        """
        if name not in self:
            raise ConfigurationError(unknown_name_message(self.kind, name, self.names()))
        return self._entries[name]

    def remove(self, name: str) -> None:
        """Remove the entry of `name`.

        Raises:
            ConfigurationError: As for `get`.
        """
        self.entry(name)
        del self._entries[name]

    def names(self) -> list[str]:
        """Return all names, sorted, including those of entry points."""
        self._load_entry_points()
        return sorted(self._entries)

    available_strategies = available_accelerators = names

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name in self._entries:
            return True
        self._load_entry_points()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def _load_entry_points(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for point in entry_points(group=self.group):
            if point.name not in self._entries:
                # Imported at its first use: one broken distribution must not break all others.
                self.register(point.name, f"{point.module}:{point.attr}", f"from {point.value}")


_INSTEAD = {
    "precision": {
        "'bf16-mixed' or 'bf16-true'": "bfloat16 torch.bfloat16",
        "'16-mixed' or '16-true'": "16-bit amp float16 fp16 half mixed o1 o2 torch.float16",
        "'32-true'": "float float32 fp32 full no none torch.float torch.float32",
        "'64-true'": "double float64 fp64 torch.float64",
        "'float8'": "fp8",
        "'32-true' and torch.set_float32_matmul_precision('high')": "tf32",
        "plugins=TorchAOPrecision('int8-weights')": "8 int8",
        "strategy='ddp'": "ddp",
        "strategy='fsdp'": "fsdp",
    },
    "accelerator": {
        "'cuda': torch for ROCm uses that name": "hip rocm",
        "accelerator='cuda', devices=[0]": "cuda:0 gpu:0",
        "strategy='ddp'": "ddp",
        "strategy='fsdp'": "fsdp",
    },
    "strategy": {
        "accelerator='cpu'": "cpu",
        "accelerator='gpu'": "cuda gpu",
        "accelerator='cpu', strategy='ddp'": "ddp_cpu",
        "precision='16-mixed'": "16-mixed fp16",
        "precision='bf16-mixed'": "bf16 bf16-mixed",
        "'ddp'": "data_parallel distributeddataparallel",
        "'zero3'": "stage3 stage_3 zero-3 zero_3",
        "'auto', or leave strategy= out": "none no",
        "LocalSGDStrategy()": "hivemind localsgd",
        "ModelParallelStrategy(parallelize_fn)": "2d 3d megatron model_parallel tensor_parallel tp",
        "FSDPStrategy(context_parallel=ContextParallel())": "context_parallel cp sequence_parallel",
        "'fsdp'": "fsdp1 fsdp2 fsdp_native fullyshardeddataparallel fully_shard fully_sharded",
        "'pipeline'": "pipeline_parallel pp",
        "'zero1', 'zero2' or 'zero3'": "zero",
        "LocalSGDStrategy(outer_optimizer=lambda p: SGD(p, 0.7, 0.9, nesterov=True))": "diloco",
    },
}
"""Our equivalents of names of other libraries."""


def unknown_name_message(kind: str, given: object, known: list[str]) -> str:
    """Return the error text for an unknown name: similar names first, then all of them."""
    hint = did_you_mean(given, known)
    for instead, names in _INSTEAD.get(kind, {}).items():
        if str(given).lower() in names.split():
            hint = f" Write {instead if re.match(r'[a-z]+=', instead) else f'{kind}={instead}'}."
    return f"{kind}={given!r} is not known.{hint} Known: {', '.join(known)}."


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return a sentence with up to three names of `known` that are similar to `given`; else ""."""
    close = get_close_matches(str(given).lower(), known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
