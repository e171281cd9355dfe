"""`CheckpointVerbs`: save and load checkpoints, and resume runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.checks import check_state
from fabric.core.arguments import explains_arguments
from fabric.core.errors import ArgumentTypeError
from fabric.core.slices import use_slice
from fabric.facts import RankFacts

if TYPE_CHECKING:
    from pathlib import Path

    from torch.nn import Module
    from torch.optim import Optimizer

    from fabric.checkpoint.background.pending import PendingSave
    from fabric.core.types import Filter, PathLike


@explains_arguments
class CheckpointVerbs(RankFacts):
    """save, load, load_raw, save_latest, load_latest. All ranks must make each call."""

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
        """Write `state` atomically: to a temporary file next to `path`, flushed, then renamed. All ranks must
        call this.

        Args:
            path: A file or directory, which is replaced if it is a checkpoint. A name that ends with
                ".safetensors" writes a safetensors file, for Hugging Face and others.
            state: Models, optimizers, anything with `state_dict`, and plain data, by name. For safetensors:
                `{"model": model}`, or a dictionary of tensors, and nothing else.
            filter: For a name of `state`: which of its entries to keep, (key, value) -> bool.
            format: "full": one file by rank zero, which plain `torch.load(path, weights_only=True)` reads.
                "sharded": a directory to which each rank writes its part without a gather.
                `torch.distributed.checkpoint.load` reads it, and `fabric consolidate` converts it to one
                file. None: the strategy's default (`state_dict_type`). That is "sharded" for "fsdp", "zero2",
                "zero3", "hsdp" and ModelParallelStrategy on file systems, without your own CheckpointIO; else
                "full".
            wait: False: copy the state to host memory and return; a thread writes the copy meanwhile. The
                next save or load waits for it.
            allow_pickle: Whether objects of any class are pickled (a replay buffer, an argparse.Namespace).
                `fabric.load(..., weights_only=False)` reads such a checkpoint, and can run any code in it.

        Returns:
            With `wait=False` a handle: `.wait()` on all ranks, `.done()`. An error of the save is raised by
            `.wait()`, or by the next save or load, or ends the process with exit code 1.

        Raises:
            ArgumentTypeError: A value that loading could not read; the message names its key.
            ConfigurationError: Unknown `format`; "sharded" to a URL or with your own CheckpointIO; a value
                that safetensors cannot hold.
            KeyError: `filter` names something that is not in `state`.
            OSError: It cannot be written (a RankError on ranks whose own write succeeded).
        """
        self._require_launch("save()")
        options: dict[str, Any] = {} if format is None else {"format": format}
        if not wait:
            options["wait"] = False
        if allow_pickle:
            options["allow_pickle"] = True
        return self._strategy.save_checkpoint(path, state, filter=filter, **options)

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
            path: The file or directory, whose integrity is checked first. Also a file that plain torch wrote,
                a safetensors file, and a directory of Hugging Face with such files. The last two hold one
                model, for `{"model": model}`, of which each rank reads its part only.
            state: As for `save`; objects are loaded in place, plain data are replaced. None: everything is
                returned.
            strict: Whether it must hold every name of `state`, every key of its models, and the parameters of
                its optimizers in the same groups. Else an optimizer gets the states whose names it has.
            weights_only: False trusts it and unpickles arbitrary objects.

        Returns:
            Entries of the checkpoint that are not in `state`.

        Raises:
            FileNotFoundError: There is no such file or directory.
            DamagedCheckpointError: A file of it is missing, was changed, or is not a checkpoint.
            KeyError: With `strict`, it lacks a name of `state`.
            UsageError: It does not fit `state`, holds objects that `weights_only` refuses, or is another
                checkpoint on some ranks and would be joined with the others into sharded objects.
        """
        self._require_launch("load()")
        if state is not None:
            check_state(state, "fabric.load")
        return self._strategy.load_checkpoint(path, state, strict, weights_only)

    def load_raw(
        self,
        path: PathLike,
        obj: Module | Optimizer,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load a bare state dict (`torch.save(model.state_dict(), path)`, a safetensors file, a directory of
        Hugging Face) into a model or optimizer. All ranks must call this.

        Args:
            path: As for `load`.
            obj: The model or optimizer, changed in place.
            strict: As for `load`.
            weights_only: As for `load`.

        Raises:
            FileNotFoundError: There is no such file or directory.
            DamagedCheckpointError: As for `load`.
            ArgumentTypeError: `obj` has no state to load, or is the first argument.
            UsageError: The state does not fit `obj`.
        """
        self._require_launch("load_raw()")
        if isinstance(obj, dict):
            raise ArgumentTypeError(
                "load_raw(path, obj) takes one model or optimizer, but got a dict. Write fabric.load(path, "
                "state)."
            )
        self._strategy.load_checkpoint(path, obj, strict, weights_only)

    def save_latest(
        self, directory: PathLike, state: dict[str, Any], *, step: int, keep: int = 3, wait: bool = True
    ) -> Path | str:
        """Save as the checkpoint of `step` in a directory, and remove all but the newest `keep`. All ranks
        must call this.

        Old checkpoints are removed after the new one is complete. Each run needs its own directory.

        Args:
            directory: A path or a URL; created if missing.
            state: As for `save`.
            step: Orders the checkpoints, 0 or more; one of the same step is replaced.
            keep: Number of checkpoints that remain, at least 1.
            wait: As for `save`; the next `save_latest` raises an error of this save. A strategy that has its
                own `save_checkpoint`, such as DeepSpeed, writes before this returns.

        Returns:
            The path of the checkpoint: DIRECTORY/step-00000042.pt; a sharded one has no ".pt".

        Raises:
            ConfigurationError: `step` or `keep` is out of its range.
            OSError: As for `save`.
        """
        self._require_launch("save_latest()")
        path: Path | str = use_slice("latest").save_latest(self._strategy, directory, state, step, keep, wait)
        return path

    def load_latest(self, directory: PathLike, state: dict[str, Any], strict: bool = True) -> int | None:
        """Load the newest checkpoint of `save_latest` that is complete and valid. All ranks must call this.

        A warning names each damaged checkpoint, and the one before it is loaded.

        Args:
            directory: The directory of `save_latest`; it need not exist.
            state: As for `load`.
            strict: As for `load`.

        Returns:
            The step of the checkpoint; None: there is none, and `state` is unchanged.

        Raises:
            UsageError: There are checkpoints, and none of them can be read.
            NotADirectoryError: `directory` is a file (a RankError on ranks above zero).
        """
        self._require_launch("load_latest()")
        check_state(state, "fabric.load_latest")
        step: int | None = use_slice("latest").load_latest(self._strategy, directory, state, strict)
        return step
