"""`Fabric`: the methods that a training loop calls. It names no backend, and delegates to the strategy.

A verb marked "all ranks" must be called by every rank, in the same order.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from fabric.checks import (
    check_callbacks,
    check_clipped,
    check_forward_module,
    check_function,
    check_loggers,
    check_not_set_up,
    check_schedule,
    raw_iterations,
    record_raw_iterations,
    warn_if_not_set_up,
)
from fabric.core.arguments import eager_verb, explains_arguments, item_count
from fabric.core.errors import ArgumentTypeError, FabricError, UsageError
from fabric.core.messages import show
from fabric.core.slices import use_slice
from fabric.data.epochs import BegunEpochs
from fabric.launch.parent_death import LAUNCHED, report_to_supervisor
from fabric.resolve import Machine, Request, resolve
from fabric.saving import CheckpointVerbs
from fabric.setup import SetupVerbs
from fabric.utilities.seed import seed_everything, seed_rank
from fabric.verbs import CollectiveVerbs
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from fabric.accelerators.accelerator import Accelerator
    from fabric.batch_size.search import BatchSize
    from fabric.core.types import PathLike
    from fabric.loggers.logger import Logger
    from fabric.strategies.strategy import Strategy
    from fabric.wrappers import _FabricModule


def _do_nothing(*_: Any) -> None:
    """Default argument of `fabric.launch`: the ranks run the code after `launch()`."""


@explains_arguments
class Fabric(SetupVerbs, CollectiveVerbs, CheckpointVerbs):
    """Your own training loop on one or many processes, with the same numbers.

    With several ranks, verbs that need them raise a UsageError before `launch()`.
    If ranks call different verbs, or one verb with different data, all of them raise a CollectiveMismatch.

    Args:
        accelerator: "auto", "cpu", "cuda", "mps", "gpu", another registered name, or an Accelerator.
        strategy: "auto", a registered name ("ddp", "ddp_spawn", ...), or a Strategy.
        devices: Number of devices, or their indices; see docs/tutorials/several-gpus.md. "auto": all of them
            (CPU: 1).
        num_nodes: Number of machines.
        precision: "32-true", "bf16-mixed", ...; see docs/how-to/mixed-precision.md. None: "32-true".
        plugins: Precision, ClusterEnvironment and CheckpointIO objects, each at most once; and your own parts
            (`fabric.core.parts.Part`).
        callbacks: Objects whose methods `call` and the wrappers call by name.
        loggers: Loggers for `log` and `log_dict`.
        replica_check: When ranks compare values that must be equal; see docs/how-to/different-numbers.md.
            True: after backwards number 1, 2, 4, ..., 1,024, and each 1,024th; a number n: after each n-th;
            False: never. None: FABRIC_REPLICA_CHECK, or True.
        report: Directory to which each rank appends its steps and events; see fabric/report/README.md.
            None: FABRIC_REPORT, or no report.

    Raises:
        ConfigurationError: Arguments that are unknown, impossible on this machine, or contradict each other.
        ArgumentTypeError: An argument of the wrong kind.
    """

    def __init__(
        self,
        *,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: list[Any] | Any | None = None,
        loggers: Logger | list[Logger] | None = None,
        replica_check: bool | int | None = None,
        report: PathLike | None = None,
    ) -> None:
        report_to_supervisor()  # errors of the arguments, too
        plan = resolve(
            Request(accelerator, strategy, devices, num_nodes, precision, plugins), Machine.detect()
        )
        self._strategy: Strategy = plan.strategy
        self._strategy.replica_check = check_schedule(replica_check)
        if report is not None or os.environ.get("FABRIC_REPORT"):
            use_slice("report").record(self, report)
        self._strategy.bind(plan)
        self._callbacks = check_callbacks(callbacks)
        self._loggers = check_loggers(loggers)
        self._stopper = None
        self._launched = False
        self._clipped: set[tuple[int, int]] = set()
        self._begun_epochs = BegunEpochs()
        # `fabric run` started this process as a rank: loops written for it need no launch().
        if not self._strategy.traits.needs_launch or os.environ.get(LAUNCHED) == "cli":
            self._enter_rank()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = _launch_before_run(cls.__dict__["run"])  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stopper": None}

    if not TYPE_CHECKING:  # to type checkers an attribute that is missing stays an error

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises what a property raised
            from fabric.core.advice import attribute_error

            raise attribute_error(self, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the ranks and call a subclass's `run(*args, **kwargs)` on each. All ranks must call this.

        Raises:
            UsageError: The subclass has no `run`.
        """
        raise UsageError(
            f"{type(self).__name__} has no run(). Subclass Fabric and write `def run(self, ...)`, or use "
            f"fabric.launch()."
        )

    def launch(self, function: Callable[..., Any] = _do_nothing, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks and run the same code on each. Later calls only call `function`.

        If the ranks are scripts, all ranks must call this. The process that starts them supervises them to
        their end, and exits here.

        Args:
            function: Called on every rank as function(fabric, *args, **kwargs). Required if processes are
                started by spawn, fork or forkserver; otherwise the ranks run the code after `launch()`.
            args: Arguments of `function`; under spawn and forkserver they must pickle.
            kwargs: Keyword arguments of `function`.

        Returns:
            The function's result on rank zero (on this rank, if the ranks are scripts).

        Raises:
            ArgumentTypeError: `function` cannot be called with a Fabric and these arguments.
            LaunchError: A process could not be started, or failed.
        """
        if function is _do_nothing and kwargs:
            given = ", ".join([f"{name}={show(value)}" for name, value in kwargs.items()])
            raise ArgumentTypeError(
                f"fabric.launch({given}) got arguments, but no function that takes them. Write "
                f"Fabric({given}) for settings, or fabric.launch(train, {given})."
            )
        check_function(function, args, kwargs)
        launcher = None if self._launched else self._strategy.launcher
        if launcher is None:
            return self._run_in_rank(function, *args, **kwargs)
        if launcher.start_method != "popen" and function is _do_nothing:
            return launcher.launch(None)
        return launcher.launch(self._run_in_rank, function, *args, **kwargs)

    def _run_in_rank(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._enter_rank()
        return None if function is _do_nothing else function(self, *args, **kwargs)

    def _enter_rank(self) -> None:
        if not self._launched:
            self._strategy.setup_environment()
        self._launched = True
        if self.is_global_zero and self.world_size > 1:
            record_raw_iterations()

    @eager_verb
    def backward(
        self, tensor: torch.Tensor, *args: Any, model: _FabricModule | None = None, **kwargs: Any
    ) -> None:
        """Run the backward pass, in place of `loss.backward()`, and synchronise gradients. All ranks must
        call this.

        Args:
            tensor: The loss, a one-element tensor; for others `args` has the gradient, as in torch.
            args: Arguments of `Tensor.backward`.
            model: The model that computed the loss, for engines that need it.
            kwargs: Keyword arguments of `Tensor.backward`.

        Raises:
            ArgumentTypeError: `tensor` is not a tensor; arguments that `Tensor.backward` does not take.
            UsageError: The loss requires no gradient, has several elements, or its graph was freed.
        """
        if not isinstance(tensor, torch.Tensor):
            from fabric.core.advice import loss_kind_text

            raise ArgumentTypeError(loss_kind_text(tensor))
        if model is not None:
            check_forward_module(model, "fabric.backward")
        strategy = self._strategy
        if raw_iterations or not self._backward_checked:
            self._require_launch("backward()")
            if strategy.is_global_zero and strategy.world_size > 1 and strategy.data_rank[1] > 1:
                nothing = not self._models and not strategy.layout.free_parameters
                warn_if_not_set_up(strategy.data_rank[1], nothing and not self._backward_checked)
            self._backward_checked = True
            raw_iterations.clear()
        gate = strategy.gate
        gate.open = True
        try:
            if strategy.plain_backward:
                tensor.backward(*args, **kwargs)
                return
            strategy.backward(tensor, None if model is None else model._forward_module, *args, **kwargs)
        except (RuntimeError, TypeError) as error:
            strategy.explain(error)
            from fabric.core.advice import backward_error

            if (explained := backward_error(tensor, error, args, kwargs)) is None:
                raise
            raise explained from error
        finally:
            gate.open = False

    @eager_verb
    def clip_gradients(
        self,
        module: Any,
        optimizer: Any,
        clip_val: float | int | None = None,
        max_norm: float | int | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor | None:
        """Clip the optimizer's gradients, by value or to a total norm, before `optimizer.step()`. All ranks
        must call this.

        Args:
            module: The model that `setup` returned.
            optimizer: Its gradients are clipped, in place.
            clip_val: Each element is clamped to [-clip_val, clip_val].
            max_norm: Upper limit of the norm of all gradients of the whole model.
            norm_type: 2.0: the Euclidean norm; `float("inf")`: the largest element.
            error_if_nonfinite: Whether a norm that is not finite raises.

        Returns:
            The total norm before clipping, a tensor of shape (), if `max_norm` was given.

        Raises:
            ConfigurationError: Both limits, or neither, or a negative one; the optimizer is that of another
                model.
            ArgumentTypeError: `module` is not a model, `optimizer` not an optimizer, or a limit not a number.
            RuntimeError: The norm is not finite, with `error_if_nonfinite`, without a loss scaler. On a
                device the next call checks it, so that the host does not wait.
            UsageError: The gradients are unsynchronised: no backward outside of `no_backward_sync` followed.
        """
        module, optimizer = unwrap(module), unwrap(optimizer)
        limits = {"clip_val": clip_val, "max_norm": max_norm, "norm_type": norm_type}
        if (clip_val is None) == (max_norm is None) or (id(module), id(optimizer)) not in self._clipped:
            check_clipped(module, optimizer, limits, self._strategy.modules)
            self._clipped.add((id(module), id(optimizer)))
        for clipping in self._strategy.hooks["clipping"]:
            clipping(optimizer, limits)
        if clip_val is not None:
            return self._strategy.clip_gradients_value(module, optimizer, clip_val)  # type: ignore[func-returns-value]
        return self._strategy.clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)  # type: ignore[arg-type]

    @eager_verb
    def normalize_gradients(self, module: Any, num_items: Any, *, optimizer: Any = None) -> int | float:
        """Divide gradients of summed losses by the number of items of all ranks, once per step. All ranks
        must call this.

        Call it after the last backward of a step, and before `clip_gradients` and `optimizer.step()`. The
        gradients are then those of the sum of all losses divided by the number of all items, as for one big
        batch. The distribution of items over ranks and micro-batches does not matter. Costs one small
        message, none on one process.

        Args:
            module: The model that `setup` returned.
            num_items: How many items (tokens, rows; or a sum of weights) this rank had in this step, in all
                its micro-batches: a number or a one-element tensor, 0 or more. Ranks that share the same data
                (tensor parallel) give the same number, which counts once.
            optimizer: Divide the gradients of this optimizer's parameters, instead of those of `module`.

        Returns:
            The number of items of all ranks, an int if all ranks gave ints. If it is 0, nothing is divided.

        Raises:
            ArgumentTypeError: `num_items` is not a number; `optimizer` is not an optimizer.
            ConfigurationError: `num_items` is negative, not finite, or 2**63 or more.
            UsageError: The model is not set up; or the gradients are unsynchronised, as for `clip_gradients`.
            CollectiveMismatch: Another rank raised one of these, or counted the same data differently.
        """
        self._require_launch("normalize_gradients()")
        strategy = self._strategy
        try:
            check_forward_module(module, "fabric.normalize_gradients")
            if optimizer is not None:
                check_not_set_up((unwrap(optimizer),), torch.optim.Optimizer, "fabric.normalize_gradients")
            count = item_count(num_items, "fabric.normalize_gradients")
        except FabricError as error:
            strategy.abort_call("normalize_gradients", error)
        return strategy.normalize_gradients(unwrap(module), count, unwrap(optimizer))

    def autocast(self) -> AbstractContextManager[Any]:
        """Context in which operations outside `forward` run in the strategy's precision. No rank waits."""
        return self._strategy.precision.forward_context()

    def no_backward_sync(self, module: _FabricModule, enabled: bool = True) -> AbstractContextManager[Any]:
        """Context in which backward passes keep gradients local, for all but the last micro-batch of a step.
        All ranks must call this, with the same `enabled`.

        Args:
            module: The model that `setup` returned.
            enabled: False makes the context do nothing: `no_backward_sync(model, enabled=not last)`.

        Raises:
            UsageError: The model is not set up.
        """
        wrapped = check_forward_module(module, "fabric.no_backward_sync")
        return self._strategy.no_backward_sync(wrapped, enabled) if enabled else nullcontext()

    def find_batch_size(self, step: Callable[[int], Any], *, start: int = 8, global_batch: int) -> BatchSize:
        """Return the largest batch size of a rank whose training step fits on every rank, and how many such
        batches make the global batch. All ranks must call this.

            batch_size, accumulation = fabric.find_batch_size(step, global_batch=512)

        Tries sizes that divide the rows of a rank: doubled from `start`, then by bisection. Each try runs two
        steps, since the first one creates the optimizer states. In them ranks exchange nothing but the calls
        of verbs, so that no rank waits for one that is out of memory. Afterwards models, optimizers,
        schedulers, loaders, the loss scale and random states are as before.

        Args:
            step: `step(batch_size)` runs forward, backward and the optimizer's step on so many rows.
            start: The first size.
            global_batch: Rows per optimizer step of all ranks together.

        Raises:
            ArgumentTypeError: `step` is not a function, or a number is not an int.
            ConfigurationError: A number is less than 1; the ranks cannot share `global_batch` equally; the
                device is the CPU; steps of the strategy need other ranks.
            UsageError: A batch size of 1 does not fit; no model is set up; parameters have gradients.
            RankError: The step failed on another rank.
        """
        self._require_launch("find_batch_size()")
        return use_slice("batch size").find_batch_size(self._strategy, step, start, global_batch)  # type: ignore[no-any-return]

    def to_device(self, obj: Any) -> Any:
        """`obj` (a module, moved in place; a tensor; a nesting) on this rank's device. No rank waits."""
        if isinstance(obj, torch.nn.Module):
            self._strategy.module_to_device(obj)
            return obj
        return self._strategy.batch_to_device(obj)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Context in which new tensors are made on this device, in this precision's dtype. No rank waits."""
        return self._strategy.tensor_init_context()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context in which new modules are made on this device, in this precision's dtype. No rank waits.

        Args:
            empty_init: True: weights are not initialised but NaN, for models that load a checkpoint. With
                strategies that shard models, weights take no memory until `setup`, which initialises them
                part by part with the values of a plain construction.
        """
        self._require_launch("init_module()")
        return self._strategy.module_init_context(empty_init)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """The older name of `init_module()` for sharded strategies. No rank waits."""
        self._require_launch("sharded_model()")
        return self._strategy.module_sharded_context()

    def seed_everything(
        self,
        seed: int | None = None,
        workers: bool | None = None,
        verbose: bool = True,
        *,
        per_rank: bool = False,
    ) -> int:
        """Seed Python, numpy and torch; loaders and workers derive their streams from it. No rank waits.

        Args:
            seed: 0 to 2**32 - 1; None: FABRIC_GLOBAL_SEED, or 0.
            workers: Kept for compatibility: workers of set-up loaders always have separate random streams.
            verbose: Whether to log the seed.
            per_rank: Give each rank a separate random stream (dropout masks), after all ranks initialised
                their models equally. Call it after `launch()`, because the rank is unknown before.

        Returns:
            The seed.
        """
        if per_rank:
            self._require_launch("seed_everything(per_rank=True)")
        used = seed_everything(seed, workers=True if workers is None else workers, verbose=verbose)
        if per_rank:
            seed_rank(used, self._data_rank)
        return used


def _launch_before_run(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a subclass's `run`: launch if necessary, and run it inside the strategy's module context."""

    @functools.wraps(run)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._launched:
            return self.launch(_call_run, *args, **kwargs)
        if type(self).run is not wrapper:  # called by super().run(): the context is entered already
            return run(self, *args, **kwargs)
        with self.strategy.module_sharded_context():
            return run(self, *args, **kwargs)

    return wrapper


def _call_run(fabric: Any, *args: Any, **kwargs: Any) -> Any:
    return fabric.run(*args, **kwargs)
