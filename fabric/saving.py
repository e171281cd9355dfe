"""`CheckpointVerbs`: saving, loading, and going on where a run was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.checks import check_state
from fabric.core.errors import ArgumentTypeError
from fabric.core.slices import use_slice
from fabric.facts import RankFacts

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.checkpoint.background.pending import PendingSave
    from fabric.core.types import Filter, PathLike


class CheckpointVerbs(RankFacts):
    """save, load, load_raw, save_latest, load_latest. All ranks make each of these calls."""

    def save(
        self,
        path: PathLike,
        state: dict[str, Any],
        filter: Filter | None = None,
        *,
        format: str | None = None,
        wait: bool = True,
        allow_pickle: bool = False,
    ) -> PendingSave | None:
        """Write `state`, complete or not at all: beside `path`, flushed, and renamed. All ranks must call
        this.

        Args:
            path: A file or directory, which is replaced if it is a checkpoint. With a name that ends with
                ".safetensors" a file for Hugging Face and others, of the package safetensors.
            state: Models, optimizers, anything with `state_dict`, and plain data, by name. For safetensors:
                `{"model": model}`, or a dictionary of tensors, and nothing else.
            filter: For a name of `state`: which of its entries to keep, (key, value) -> bool.
            format: "full", one file by rank zero, which plain `torch.load(path, weights_only=True)` reads.
                "sharded", a directory into which each rank writes its part, and nothing is gathered, which
                `torch.distributed.checkpoint.load` reads, and `fabric consolidate` makes one file of. None:
                as the strategy says (`state_dict_type`): "sharded" for "fsdp", "zero2", "zero3", "hsdp" and
                ModelParallelStrategy on file systems, without a CheckpointIO of yours; else "full".
            wait: False: copy the state to host memory and return; the copy is written while the loop goes on.
                One at a time: the next save or load waits for it.
            allow_pickle: Whether objects of any class are pickled (a replay buffer, an argparse.Namespace).
                `fabric.load(..., weights_only=False)` reads such a checkpoint, and can run any code in it.

        Returns:
            With `wait=False` the save under way: `.wait()` on all ranks, `.done()`. Its error is raised by
            that, by the next save or load, or ends the process with exit code 1.

        Raises:
            ArgumentTypeError: A value that loading would not read back; the message names its place.
            ConfigurationError: Unknown `format`; "sharded" to a URL or with a CheckpointIO of yours; what
                safetensors cannot hold.
            KeyError: `filter` names something that is not in `state`.
            OSError: It cannot be written (a RankError that says so on ranks that could).
        """
        self._require_launch("save()")
        check_state(path, state, True, "fabric.save")
        given: dict[str, Any] = {} if format is None else {"format": format}
        if not wait:
            given["wait"] = False
        if allow_pickle:
            given["allow_pickle"] = True
        return self._strategy.save_checkpoint(path, state, filter=filter, **given)

    def load(
        self,
        path: PathLike,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint of `save`, of any format, strategy and number of ranks, into `state`. All ranks
        must call this.

        Args:
            path: The file, or the directory, which is checked first; also one that torch alone has written, a
                safetensors file, and a directory of Hugging Face with such files. These two have one model,
                for `{"model": model}`, of which each rank reads its part only.
            state: As for `save`; objects are loaded in place, plain data are replaced. None: everything is
                returned.
            strict: Whether it must hold every name of `state`, every key of its models, and the parameters of
                its optimizers in the same groups. Else an optimizer gets the states whose names it has.
            weights_only: False trusts it and unpickles arbitrary objects.

        Returns:
            What it holds beyond `state`.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpointError: A file of it is missing, not what was written, or no checkpoint.
            KeyError: With `strict`, it lacks a name of `state`.
            UsageError: It does not fit `state`, or holds objects that `weights_only` refuses.
        """
        self._require_launch("load()")
        check_state(path, state, strict, "fabric.load")
        return self._strategy.load_checkpoint(path, state, strict, weights_only)

    def load_raw(
        self,
        path: PathLike,
        obj: Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Read a bare state dict (`torch.save(model.state_dict(), path)`, a safetensors file, a directory of
        Hugging Face) into a model or optimizer. All ranks must call this.

        Args:
            path: As for `load`.
            obj: The model or optimizer, changed in place.
            strict: As for `load`.
            weights_only: As for `load`.

        Raises:
            FileNotFoundError: There is none.
            DamagedCheckpointError: As for `load`.
            ArgumentTypeError: `obj` has no state to load.
            UsageError: It is the state of something else.
        """
        self._require_launch("load_raw()")
        if isinstance(obj, dict):
            raise ArgumentTypeError(
                "load_raw(path, obj) takes one model or optimizer. Use fabric.load for dictionaries."
            )
        self._strategy.load_checkpoint(path, obj, strict, weights_only)

    def save_latest(
        self, directory: PathLike, state: dict[str, Any], *, step: int, keep: int = 3, wait: bool = True
    ) -> Path | str:
        """Save as the checkpoint of `step` in a directory, and remove all but the newest `keep`. All ranks
        must call this.

        The oldest ones go when the new one is complete. One run writes into a directory.

        Args:
            directory: Made if it is not there; a path or a URL.
            state: As for `save`.
            step: By which checkpoints are ordered, 0 or more; one of the same step is replaced.
            keep: How many stay, at least 1.
            wait: As for `save`; the next `save_latest` tells of an error.

        Returns:
            Where the checkpoint is, or will be: DIRECTORY/step-00000042.pt; a directory has no ".pt".

        Raises:
            ConfigurationError: `step` or `keep` is no such number.
            OSError: As for `save`.
        """
        self._require_launch("save_latest()")
        path: Path | str = use_slice("latest").save_latest(self._strategy, directory, state, step, keep, wait)
        return path

    def load_latest(self, directory: PathLike, state: dict[str, Any], strict: bool = True) -> int | None:
        """Load the newest checkpoint of `save_latest` that is complete and valid. All ranks must call this.

        One that is damaged is named in a warning, and the one before it is loaded.

        Args:
            directory: Where they are; it need not exist.
            state: As for `load`.
            strict: As for `load`.

        Returns:
            The step of the checkpoint; None: there is none, and `state` is as it was.

        Raises:
            UsageError: There are checkpoints, and none of them can be read.
            NotADirectoryError: `directory` is a file (a RankError that says so on ranks above zero).
        """
        self._require_launch("load_latest()")
        step: int | None = use_slice("latest").load_latest(self._strategy, directory, state, strict)
        return step
