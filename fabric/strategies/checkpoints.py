"""`Checkpoints`: what a strategy does to save and to load, with files of either format."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fabric.collectives.frames import call_of
from fabric.core.errors import ConfigurationError
from fabric.core.slices import use_slice
from fabric.strategies.exchange import Exchange
from fabric.utilities.cloud_io import local_path
from fabric.utilities.state_keys import add_tied_keys, clean_keys, fit_keys
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.checkpoint.background.pending import PendingSave
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.checkpoint.snapshot import Snapshot
    from fabric.core.types import Filter, PathLike
    from fabric.strategies.layout import Layout


class Checkpoints(Exchange):
    """Saving and loading: all ranks make each of these calls, and a failure on one is raised on all."""

    layout: Layout
    state_dict_type = "full"
    """The format of checkpoints: "full" or "sharded"."""
    pending: PendingSave | None = None
    """The save that goes on beside the loop."""
    snapshot: Snapshot | None = None
    """What it writes, or wrote: the next one takes its memory."""
    _checkpoint_io: CheckpointIO | None = None

    @cached_property
    def modules(self) -> WeakKeyDictionary[Module, None]:
        """The user's modules that were set up, in this order."""
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned rank sets its models up itself; those of this process stay here.
        state = {**super().__getstate__(), "pending": None, "snapshot": None}
        state.pop("modules", None)
        return state

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The IO that writes and reads checkpoints; by default one file by torch.save."""
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
        """Write `state`: "full" to one file, on rank zero; "sharded" to a directory, each rank its part. All
        ranks must call this.

        Args:
            path: Where to.
            state: As in `Fabric.save`.
            storage_options: For the checkpoint IO.
            filter: As in `Fabric.save`.
            format: "full" or "sharded"; None: as `state_dict_type` says.
            wait: False: write a copy beside the loop, which goes on.
            then: What rank zero does when the checkpoint is there.
            facts: What is kept beside the data, for those who look at the files.
            allow_pickle: As in `Fabric.save`.

        Raises:
            ConfigurationError: A `format` that is unknown, or not there for `path`; other errors as for
                `Fabric.save`.
        """
        from fabric.checkpoint import state as states

        self.finish_save()
        sharded = False
        if (format or self.state_dict_type) != "full":
            try:
                format, where = use_slice("sharded writer").choose_format(self, path, format, storage_options)
            except ConfigurationError as error:
                self.abort_call("save", error)
            sharded = format == "sharded"
        # Of the paths rank zero's counts: they are shown where ranks save other objects, and not compared.
        call = call_of("save", states.split_content(self, state) + ", sharded" * sharded)
        if self.topology.world_size > 1:
            self.channel().check_call(call._replace(what=f"{path}: {call.what}" if call.what else ""))
        for saving in self.hooks["saving"]:
            saving()
        facts = {"strategy": type(self).__name__, "world_size": self.topology.world_size, **(facts or {})}
        write: Callable[[], None] | None
        if sharded:
            write = use_slice("sharded writer").save_sharded(
                self, where, state, filter, facts, wait, allow_pickle
            )
        else:
            self.checkpoint_io.facts = facts
            write = self._gathered(path, state, storage_options, filter, wait, allow_pickle)

        def work() -> None:
            if write is not None:
                write()
            if then is not None and self.topology.rank == 0:
                then()

        if not wait:
            self.pending = use_slice("background").PendingSave(self, path, None if write is None else work)
            return self.pending
        with states.together(self, f"saving {path}"):
            work()
        return None

    def _gathered(
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

        # Every rank walks the state: gathering may be collective, and a bad value must raise everywhere,
        # before the old file is touched.
        storage, where = self.checkpoint_io, path
        with states.together(self, f"saving {path}"), self.layout.gathering(keep=self.topology.rank == 0):
            checkpoint = states.gather(self, state, filter, allow_pickle)
            from fabric.checkpoint.atomic_write import is_safetensors
            from fabric.checkpoint.torch_io import TorchCheckpointIO

            ours = type(storage) is TorchCheckpointIO
            if ours and is_safetensors(path):
                use_slice("safetensors").tensors_of(
                    checkpoint, path
                )  # raises on all ranks, beside the loop too
            if self.topology.rank == 0 and not wait:
                from fabric.checkpoint.snapshot import Snapshot

                where = local_path(path) or path  # absolute: the loop may leave its directory
                # Another's IO may still hold what it was given.
                snapshot = Snapshot(self.snapshot if ours else None)
                checkpoint = snapshot.of(checkpoint)
                self.snapshot = snapshot
        if self.topology.rank != 0:
            return None
        options = () if storage_options is None else (storage_options,)
        return partial(storage.save_checkpoint, checkpoint, where, *options)

    def finish_save(self) -> None:
        """Wait for the save that goes on beside the loop, if there is one. All ranks must call this.

        Raises:
            OSError: It has failed.
        """
        if self.pending is not None:
            self.pending.wait()

    def load_checkpoint(
        self,
        path: PathLike,
        state: Any | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read the checkpoint at `path`, of either format, into `state`; gives what was left over. All ranks
        must call this.

        Arguments and errors as for `Fabric.load`; `state` may be one object as for `Fabric.load_raw`.
        """
        from fabric.checkpoint import state as states

        with self.opened(path, weights_only, state) as tree, states.together(self, f"loading {path}"):
            return self.restore(tree, state, strict)

    def restore(self, tree: dict[str, Any], state: Any, strict: bool) -> dict[str, Any]:
        """Put `tree`, which `opened` gave, into `state`; gives what was left over. All ranks must call this.

        `strict`: see `Fabric.load`.
        """
        from fabric.checkpoint import state as states

        return states.restore(self, tree, state, strict)

    @contextmanager
    def opened(
        self, path: PathLike, weights_only: bool | None = None, state: Any = None
    ) -> Iterator[dict[str, Any]]:
        """Check and open the checkpoint at `path`; yield its contents. All ranks must call this.

        Tensors can be read until the context ends. `weights_only`: see `Fabric.load`.

        Tensors of a safetensors file are under the only name of `state`.

        Raises:
            DamagedCheckpointError: A file of it is missing, or not what was written.
        """
        from fabric.checkpoint import state as states
        from fabric.checkpoint.atomic_write import present, sharded_at

        self.finish_save()
        doing, storage, found = f"loading {path}", self.checkpoint_io, present(path)
        verify = getattr(storage, "verify", None)
        directory = sharded_at(found, only_ours=verify is None)
        # Ranks of one machine that read the same files share their check.
        mine = None if directory is None else (self.topology.node_rank, str(directory))
        told = self.all_gather_object(mine, label="load") if self.topology.world_size > 1 else [mine]
        with states.together(self, doing):
            if directory is None:
                tree = states.named(storage.load_checkpoint(found, weights_only=weights_only), state)
            elif verify is not False:
                same = [rank for rank, where in enumerate(told) if where == mine]
                use_slice("sharded directory").check(directory, same.index(self.topology.rank), len(same))
        checkpoint: Any = None
        if any(told):
            with states.together(self, doing):
                if directory is not None:
                    checkpoint = use_slice("sharded reader").Checkpoint(directory, weights_only is not False)
                    tree = checkpoint.tree()
        try:
            yield tree
        finally:
            if checkpoint is not None:
                checkpoint.close()

    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        """The full state dict under the user's own keys. All ranks must call this."""
        return clean_keys(self.layout.module_state(unwrap(module)))

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load a `state_dict` saved under any wrapping; gives torch's missing and unexpected keys. All ranks
        must call this.

        `strict`: whether such keys raise, as in torch.
        """
        plain = unwrap(module)
        fitted = add_tied_keys(fit_keys(state_dict, plain), plain)
        return self.layout.load_module_state(plain, fitted, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state of an optimizer. All ranks must call this."""
        return self.layout.optimizer_state(unwrap(optimizer))

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full state into an optimizer. All ranks must call this."""
        self.layout.load_optimizer_state(unwrap(optimizer), state)
