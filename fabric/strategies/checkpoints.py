"""`Checkpoints`: saving and loading of a strategy, in the formats "full" and "sharded"."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fabric.collectives.frames import call_of
from fabric.core.errors import ConfigurationError
from fabric.core.registry import did_you_mean
from fabric.core.slices import use_slice
from fabric.strategies.exchange import Exchange
from fabric.utilities.cloud_io import local_path, target_path
from fabric.utilities.state_keys import add_tied_keys, clean_keys, fit_keys
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.checkpoint.background.pending import PendingSave
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.checkpoint.digest import Sealed
    from fabric.checkpoint.formats.registry import Format
    from fabric.checkpoint.snapshot import Snapshot
    from fabric.core.types import Filter, PathLike
    from fabric.strategies.layout import Layout


class Checkpoints(Exchange):
    """Saving and loading. All ranks must make each call; an error on one rank is raised on all."""

    layout: Layout
    state_dict_type = "full"
    """Default format of checkpoints: "full" or "sharded"."""
    pending: PendingSave | None = None
    """The unfinished save with `wait=False`, or None."""
    snapshot: Snapshot | None = None
    """The values of the last save with `wait=False`; the next one reuses its memory."""
    _checkpoint_io: CheckpointIO | None = None

    @cached_property
    def modules(self) -> WeakKeyDictionary[Module, None]:
        """The user's modules that were set up, in the order of setup."""
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # Models belong to this process; a spawned rank sets up its own.
        state = {**super().__getstate__(), "pending": None, "snapshot": None}
        state.pop("modules", None)
        return state

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The object that writes and reads checkpoints; by default one file by torch.save."""
        if self._checkpoint_io is None:
            from fabric.checkpoint.torch_io import TorchCheckpointIO

            self._checkpoint_io = TorchCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: Filter | None = None,
        *,
        format: str | None = None,
        wait: bool = True,
        then: Callable[[], None] | None = None,
        facts: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
    ) -> PendingSave | None:
        """Write `state`: "full" to one file on rank zero, "sharded" to a directory, a file per rank. All
        ranks must call this.

        Args:
            path: Destination.
            state: As in `Fabric.save`.
            storage_options: Passed to the checkpoint IO.
            filter: As in `Fabric.save`.
            format: "full" or "sharded"; None: `state_dict_type`.
            wait: False: write a copy in the background.
            then: Function that rank zero calls once the checkpoint is complete.
            facts: Metadata, stored with the data.
            allow_pickle: As in `Fabric.save`.

        Raises:
            ConfigurationError: `format` is unknown, or not supported for `path`; other errors as for
                `Fabric.save`.
        """
        from fabric.checkpoint import state as states

        self.finish_save()
        try:
            chosen, where = choose_format(self, path, format, storage_options)
        except ConfigurationError as error:
            self.abort_call("save", error)
        # Paths are shown in a mismatch, but not compared: only rank zero's is used.
        call = call_of("save", states.split_content(self, state) + (f", {chosen.name}" if chosen else ""))
        if self.topology.world_size > 1:
            self.channel().check_call(call._replace(what=f"{path}: {call.what}" if call.what else ""))
        for saving in self.hooks["saving"]:
            saving()
        facts = {"strategy": type(self).__name__, "world_size": self.topology.world_size, **(facts or {})}
        write: Callable[[], None] | None
        if chosen is not None:
            write = chosen.load().save(self, where, state, filter, facts, wait, allow_pickle)
        else:
            self.checkpoint_io.facts = facts
            write = self._full_writer(path, state, storage_options, filter, wait, allow_pickle)

        def save() -> None:
            if write is not None:
                write()
            if then is not None and self.topology.rank == 0:
                then()

        if not wait:
            self.pending = use_slice("background").PendingSave(self, path, None if write is None else save)
            return self.pending
        with states.together(self, f"saving {path}"):
            save()
        return None

    def saves_one_file(self, path: PathLike) -> bool:
        """Return whether a save to `path` without `format` writes one file, not a directory."""
        return choose_format(self, path, None, None)[0] is None

    def _full_writer(
        self,
        path: PathLike,
        state: dict[str, Any],
        storage_options: Any,
        filter: Filter | None,
        wait: bool,
        allow_pickle: bool,
    ) -> Callable[[], None] | None:
        """Gather the state; return the function that writes one file on rank zero, None on other ranks."""
        from fabric.checkpoint import state as states

        # On every rank, since gathering may be collective. A bad value must raise on all ranks, before the
        # old file is replaced.
        storage, where = self.checkpoint_io, path
        with states.together(self, f"saving {path}"), self.layout.gathering(keep=self.topology.rank == 0):
            checkpoint = states.gather(self, state, filter, allow_pickle)
            from fabric.checkpoint.formats.registry import format_of_name
            from fabric.checkpoint.torch_io import TorchCheckpointIO

            ours = type(storage) is TorchCheckpointIO
            if ours and (format := format_of_name(path)) is not None:
                # Validates here, so that all ranks raise, also with `wait=False`.
                format.load().prepared(checkpoint, path)
            if self.topology.rank == 0 and not wait:
                from fabric.checkpoint.snapshot import Snapshot

                where = local_path(path) or path  # absolute: the loop may change its working directory
                # A third-party IO may still hold the last snapshot, so its memory is not reused.
                snapshot = Snapshot(self.snapshot if ours else None)
                checkpoint = snapshot.of(checkpoint)
                self.snapshot = snapshot
        if self.topology.rank != 0:
            return None
        options = () if storage_options is None else (storage_options,)
        return partial(storage.save_checkpoint, checkpoint, where, *options)

    def finish_save(self) -> None:
        """Wait for unfinished saves with `wait=False`, also those of other Fabric objects. All ranks must
        call this.

        Raises:
            OSError: The save of this strategy failed.
        """
        from fabric.checkpoint.state import finish_writing

        finish_writing()
        if self.pending is not None:
            self.pending.wait()

    def load_checkpoint(
        self,
        path: PathLike,
        state: Any | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`, of any format, into `state`; return its other entries. All ranks
        must call this.

        Arguments and errors as for `Fabric.load`; `state` may be one object as for `Fabric.load_raw`.
        """
        from fabric.checkpoint import state as states

        with self.opened(path, weights_only, state) as tree, states.together(self, f"loading {path}"):
            return self.restore(tree, state, strict)

    def restore(self, tree: dict[str, Any], state: Any, strict: bool) -> dict[str, Any]:
        """Load `tree`, as `opened` yields it, into `state`; return its other entries. All ranks must call
        this.

        `strict`: see `Fabric.load`.
        """
        from fabric.checkpoint import state as states

        return states.restore(self, tree, state, strict)

    @contextmanager
    def opened(
        self, path: PathLike, weights_only: bool | None = None, state: Any = None
    ) -> Iterator[dict[str, Any]]:
        """Verify and open the checkpoint at `path`; yield its contents. All ranks must call this.

        Tensors can be read until the context ends. `weights_only`: see `Fabric.load`. Tensors of a
        safetensors file are under the one key of `state`.

        Raises:
            DamagedCheckpointError: A file of it is missing or was changed.
        """
        from fabric.checkpoint import state as states
        from fabric.checkpoint.atomic_write import present
        from fabric.checkpoint.formats.registry import directory_at
        from fabric.checkpoint.torch_io import TorchCheckpointIO

        self.finish_save()
        doing, found = f"loading {path}", present(path)
        storage: Any = self.checkpoint_io
        ours = type(storage).load_checkpoint is TorchCheckpointIO.load_checkpoint
        verify = getattr(storage, "verify", None)
        directory = directory_at(found, only_ours=verify is None)
        locations = self._gather_all(
            (self.topology.node_rank, str(local_path(found) or ""), directory is not None)
        )
        with self._verified(locations, found, state) as ranges:
            if directory is not None and verify is not False:
                ranges += directory[0].load().sealed(directory[1])
            elif directory is None and ours:
                ranges += storage.sealed(found)
        with states.together(self, doing):
            if directory is None:
                load = storage.load_verified if ours and local_path(found) else storage.load_checkpoint
                tree = states.named(load(found, weights_only=weights_only), state)
        checkpoint: Any = None
        if any([is_directory for *_, is_directory in locations]):
            with states.together(self, doing):
                if directory is not None:
                    checkpoint = directory[0].load().opened(directory[1], weights_only is not False)
                    tree = checkpoint.tree()
        try:
            yield tree
        finally:
            if checkpoint is not None:
                checkpoint.close()

    @contextmanager
    def _verified(self, locations: list[Any], path: PathLike, state: Any) -> Iterator[list[Sealed]]:
        """Verify the ranges of files that the context adds to the list. All ranks must call this.

        Ranks of one host that read the same files digest a part each, and all of them compare.

        Args:
            locations: Host and path of each rank.
            path: The path of this rank.
            state: What is loaded.

        Raises:
            DamagedCheckpointError: A file was changed: on all ranks that read it.
            UsageError: Ranks read different checkpoints into sharded objects.
        """
        from fabric.checkpoint import digest
        from fabric.checkpoint import state as states
        from fabric.checkpoint.same_content import compare_content, content_of

        ranges: list[Sealed] = []
        doing = f"loading {path}"
        here, rank = self.topology, self.topology.rank
        same = [other for other, where in enumerate(locations) if where == locations[rank]]
        with states.together(self, doing):
            yield ranges
            own = digest.digest_share(ranges, same.index(rank), len(same), here.local_world_size)
            key, content = digest.identity(ranges), content_of(path, ranges)
        read = self._gather_all((key, own, (content, str(path), here.job_rank)))
        shares = [read[other][1] for other in same]
        if any([read[other][0] != key for other in same]):  # replaced meanwhile
            shares = [digest.digest_share(ranges, 0, 1)]
        with states.together(self, doing):
            digest.verify(ranges, shares)
            compare_content(self, state, [each[2] for each in read])

    def _gather_all(self, value: Any) -> list[Any]:
        return [value] if self.topology.world_size == 1 else self.all_gather_object(value, label="load")

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """Return the full state dict of `module` with the keys of the user's module. All ranks must call
        this.
        """
        return clean_keys(self.layout.module_state(unwrap(module)))

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load `state_dict` into `module`; return torch's missing and unexpected keys. All ranks must call
        this.

        Keys may have prefixes of wrappers. `strict`: whether missing and unexpected keys raise, as in torch.
        """
        plain = unwrap(module)
        fitted = add_tied_keys(fit_keys(state_dict, plain), plain)
        return self.layout.load_module_state(plain, fitted, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of `optimizer`. All ranks must call this."""
        return self.layout.optimizer_state(unwrap(optimizer))

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load `state`, a full one, into `optimizer`. All ranks must call this."""
        self.layout.load_optimizer_state(unwrap(optimizer), state)


def choose_format(
    strategy: Any, path: PathLike, format: str | None, storage_options: Any
) -> tuple[Format | None, Path | None]:
    """Return the format of directories to write, None for one file, and the path on a disk.

    The format is the requested one, or else the strategy's if the storage supports it.

    Raises:
        ConfigurationError: There is no such format, or it cannot be written there.
    """
    from fabric.checkpoint.formats.registry import FORMATS, format_of_name
    from fabric.checkpoint.torch_io import TorchCheckpointIO

    rows = {row.name: row for row in FORMATS if not row.suffix}
    names = ["full", *rows]
    if format not in (None, *names):
        known = " or ".join(map(repr, names))
        raise ConfigurationError(
            f"fabric.save(format={format!r}): write {known}.{did_you_mean(str(format), names)}"
        )
    row = rows.get(format or strategy.state_dict_type)
    if row is None:
        return None, None
    storage, where, why = strategy.checkpoint_io, target_path(path), ""
    if type(storage) is not TorchCheckpointIO:
        why = f"{type(storage).__name__} stores one dictionary"
    elif where is None:
        why = f"{path} is no path of a file system"
    elif (file := format_of_name(path)) is not None:
        why = f"a name that ends with {file.suffix} is one file"
    elif storage_options is not None:
        why = f"it has no storage_options (here {storage_options!r})"
    if format and why:
        raise ConfigurationError(
            f"fabric.save(format={format!r}) writes a directory that all ranks share, but {why}. Write "
            "format='full'."
        )
    return (None if why else row), where
