"""`Strategy`: a composition of parts that implements Fabric's verbs. Complete for one device.

Subclasses choose parts, and users override methods. Setup detects overridden methods and calls them.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fabric.core.errors import CollectiveMismatch, ConfigurationError, FabricError
from fabric.core.parts import Part, composed, facts_of, hooks_of
from fabric.core.topology import Topology
from fabric.core.traits import overridden
from fabric.precision.precision import CONVERSIONS, Precision
from fabric.strategies.checkpoints import Checkpoints
from fabric.strategies.exchange import Exchange
from fabric.strategies.layout import Layout
from fabric.utilities.init import names_of_owners

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from fabric.accelerators.accelerator import Accelerator
    from fabric.checkpoint.checkpoint_io import CheckpointIO
    from fabric.core.traits import Traits
    from fabric.core.types import Optimizable
    from fabric.launch.launcher import Launcher
    from fabric.plugins.environments.cluster_environment import ClusterEnvironment


@dataclass(frozen=True)
class Plan:
    """Resolved arguments of `Fabric(...)`, passed to `Strategy.bind`."""

    strategy: Any
    accelerator: Accelerator
    devices: list[torch.device]
    """The devices of this machine."""
    num_nodes: int
    precision: Precision
    environment: ClusterEnvironment
    checkpoint_io: CheckpointIO | None
    """None: that of the strategy."""
    parts: Sequence[Part] = ()
    """Additional parts, from `Fabric(plugins=...)`."""


class BackwardGate:
    """A flag, open while `fabric.backward` runs. Outputs of `GuardedForward` raise in a backward
    without it.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = False

    def __deepcopy__(self, memo: dict[int, Any]) -> BackwardGate:
        return self  # a model and its copies share one gate


class Strategy(Checkpoints):
    """Placement of models, optimizers and data on devices and ranks: a composition of parts.

    Args:
        accelerator: Type of the devices; None: chosen by `Fabric`.
        checkpoint_io: Writes and reads checkpoints; None: one file by torch.save.
        precision: Dtypes and loss scaling; None: chosen by `Fabric`.
    """

    parallel_devices: list[torch.device] | None = None
    """The devices of this machine; None: chosen by `Fabric`."""
    cluster_environment: ClusterEnvironment | None = None
    """Source of this process's rank and world size; None: detected."""
    replica_check: bool | int = True
    """How often ranks compare their replicas; see `Fabric`."""

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.layout: Layout = Layout()
        self.argument_parts: list[Part] = []
        """Parts that are arguments, such as `context_parallel=`."""
        self.topology = Topology()
        super().__init__()
        self.arguments = {"accelerator": accelerator, "checkpoint_io": checkpoint_io, "precision": precision}
        self._bound = False
        self._accelerator = accelerator
        self._checkpoint_io = checkpoint_io
        self.gate = BackwardGate()
        self.precision = precision or Precision()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.hooks = hooks_of(self.parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # Models and optimizers refer to their strategy; a copy of a model shares it.
        return self

    @property
    def traits(self) -> Traits:
        """Properties of the layout that callers depend on."""
        return self.layout.traits

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is rank zero, or the first rank of the strategy's process group."""
        return self.topology.is_global_zero

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return self.topology.job_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process within its machine."""
        return self.topology.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this machine."""
        return self.topology.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.topology.job_size

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator; None before it is chosen."""
        return self._accelerator

    @property
    def precision(self) -> Precision:
        """Dtypes and loss scaling."""
        return self._precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self._precision = precision
        self.hooks = hooks_of(self.parts)
        self._decide_backward()

    @property
    def parts(self) -> list[Any]:
        """The parts of this strategy, in the order in which they are called."""
        return [self.layout, self._precision, *self.argument_parts, *self.slice_parts]

    def parts_with(self, hook: str) -> list[Any]:
        """Return the parts that override `hook`, the name of a method of `Part`."""
        return [part for part in self.parts if overridden(type(part), Part, hook)]

    def find_part(self, name: str) -> Any | None:
        """Return the part whose `name` is `name`, or None."""
        return next((part for part in self.parts if part.name == name), None)

    @property
    def layout_loads(self) -> bool:
        """Whether the layout overrides how a model's state dict is loaded."""
        return overridden(type(self.layout), Layout, "load_module_state")

    @property
    def launcher(self) -> Launcher | None:
        """The launcher of the other processes; None if there is nothing to launch."""
        return None

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The device mesh of the parameters, or None."""
        return self.layout.device_mesh

    @property
    def data_rank(self) -> tuple[int, int]:
        """(index of this rank's data shard, number of shards)."""
        return (
            self.data_placement[0] if self.data_placement else (self.topology.rank, self.topology.world_size)
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """`num_replicas` and `rank` by which loaders are sharded; None: all ranks read all data."""
        return None

    def bind(self, plan: Plan) -> None:
        """Complete the composition by `plan`, the resolved arguments; called once, by `Fabric`.

        Raises:
            ConfigurationError: This strategy belongs to another `Fabric`, or a size does not fit the number
                of ranks.
        """
        if self._bound:
            raise ConfigurationError(
                f"This {type(self).__name__} belongs to another Fabric, whose precision and devices it "
                "stores. Create a strategy for each Fabric."
            )
        self._bound = True
        self._accelerator = plan.accelerator
        self.precision = plan.precision
        if plan.checkpoint_io is not None:
            self._checkpoint_io = plan.checkpoint_io
        self.argument_parts = [*self.argument_parts, *plan.parts]
        for resolve in hooks_of(self.parts)["resolve"]:
            resolve(plan)
        self.parallel_devices, self.cluster_environment = plan.devices, plan.environment
        self.topology = Topology(device=plan.devices[0])
        self.transport = Exchange.make_transport(self)  # replaced once the process group exists

    def setup_environment(self) -> None:
        """Set the device, join the process group, and set up all parts. All ranks must call this."""
        if self._accelerator is not None:
            self._accelerator.setup_device(self.root_device)
        self._join_ranks()
        self.facts_part = facts_of(self.parts)
        self.hooks = hooks_of(self.parts)
        self.reducing = composed(self.hooks["reducing"])
        self.layout.channel, self.layout.gate = self.channel(), self.gate
        self.layout.after_sync = composed(self.hooks["synchronised"])
        for join in self.hooks["join"]:
            join(self)
        deciding = [part for part in reversed(self.parts) if part.data_rank is not None]
        self.data_placement = next(((part.data_rank, part.data_group) for part in deciding), None)

    def _join_ranks(self) -> None:
        """Join the process group, in strategies of several ranks."""

    def teardown(self) -> None:
        """Release groups, files and settings of this strategy."""
        self.snapshot = None
        for part in self.parts:
            part.teardown()
        self.layout.free_parameters, self.layout.collective_backward = None, False
        self.slice_parts, self.data_placement = [], None
        self.hooks = hooks_of(self.parts)
        if self._checkpoint_io is not None:
            self._checkpoint_io.teardown()
        if self._accelerator is not None:
            self._accelerator.teardown()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Context in which new tensors are on the root device, in the dtype of the precision."""
        stack = ExitStack()
        stack.enter_context(self.root_device)
        stack.enter_context(self._precision.tensor_init_context())
        return stack

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Context for new modules on the root device in the precision's dtype; `empty_init` skips values."""
        stack = ExitStack()
        stack.enter_context(self.root_device)
        stack.enter_context(self._precision.module_init_context())
        stack.enter_context(self.layout.init_context(empty_init))
        return stack

    def module_sharded_context(self) -> AbstractContextManager[Any]:
        """Context in which `Fabric.run` constructs its modules."""
        return self.layout.init_context(empty_init=None)

    def setup_module(self, module: Module) -> Module:
        """Return the module whose forward is called in place of `module`'s. All ranks must call this."""
        wrap = partial(self.layout.wrap, topology=self.topology)
        for setup in self.hooks["setup"]:
            wrap = partial(setup, wrap=wrap)
        return wrap(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer whose `step` is called in place of `optimizer`'s. All ranks must call this."""
        return self.layout.setup_optimizer(optimizer)

    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[Module, list[Optimizer], Any | None]:
        """Set up `module` and `optimizers`, return `scheduler` unchanged. All ranks must call this."""
        return self.setup_module(module), [self.setup_optimizer(o) for o in optimizers], scheduler

    def module_to_device(self, module: Module) -> None:
        """Move parameters and buffers of `module` to the root device, in place."""
        module.to(self.topology.device)

    def place_module(self, module: Module) -> None:
        """Move `module` to the root device, unless the layout does this while wrapping it."""
        if not self.layout.traits.places_models or overridden(type(self), Strategy, "module_to_device"):
            self.module_to_device(module)

    def batch_to_device(self, batch: Any, device: torch.device | None = None) -> Any:
        """Return `batch`, a tree of tensors, on `device`; None: on the root device."""
        import fabric.utilities.apply_func as moving  # faster than `from ... import` in each call

        return moving.move_data_to_device(batch, device or self.root_device)

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Return `dataloader`; engines override this to change it."""
        return dataloader

    def forward_plan(self, module: Module, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return the function that `model(x)` runs, for the wrapped `module`.

        It is `call` (None: the module's `__call__`), wrapped only if the precision or the gate need it.
        """
        plan = call or self.layout.forward_plan(module)
        if self._precision_converts:
            from fabric.strategies.precise_forward import precision_plan

            plan = precision_plan(self._precision, plan)
        return self._guarded(plan) if self._refuses_backward else plan

    def method_plan(self, module: Module, method: Callable[..., Any], marked: bool) -> Callable[..., Any]:
        """Return the function that `method`, another bound method of the user's module, runs.

        `module` is the wrapped module. A `marked` method has the precision of forward, too.
        """
        synced = self.layout.method_plan(module, method, marked)
        if marked:
            return self.forward_plan(module, synced)
        return self._guarded(synced) if self._refuses_backward else synced

    def step_plan(self, optimizer: Optimizer) -> Callable[..., Any] | None:
        """Return the function that `optimizer.step(closure)` runs; None: the optimizer's `step`."""
        if type(self).optimizer_step is not Strategy.optimizer_step:
            return self.optimizer_step
        if self._precision.needs_step:
            return self._precision.optimizer_step
        return None

    def backward(self, tensor: Any, module: Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass. Arguments as for `Fabric.backward`. All ranks must call this."""
        precision = self._precision
        if not self._precision_backward:
            self.layout.backward(tensor.__class__.backward, tensor, *args, **kwargs)
            return
        replaced = precision.pre_backward(tensor, module)
        tensor = tensor if replaced is None else replaced
        self.layout.backward(
            lambda t, *a, **k: precision.backward(t, module, *a, **k), tensor, *args, **kwargs
        )
        precision.post_backward(tensor, module)

    def stop_signals(self) -> tuple[int, ...]:
        """Return additional signals by which the cluster announces that it will stop the job."""
        number = getattr(self.cluster_environment, "requeue_signal", None)
        return () if number is None else (number,)

    def explain(self, error: Exception) -> None:
        """Raise a clearer error in place of `error`, of torch in a backward, if a part has one."""
        for failed in self.hooks["failed"]:
            failed(error, "backward")

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Step `optimizer`; `kwargs` are the user's (a `closure`). All ranks must call this."""
        return self._precision.optimizer_step(optimizer, **kwargs)

    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Context in which gradients of the wrapped `module` stay local, if `enabled`."""
        return self.layout.no_sync(module) if enabled else nullcontext()

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale the optimizer's gradients to a total norm of at most `max_norm`; return the norm before, of
        shape (). All ranks must call this.

        Arguments as for `Fabric.clip_gradients`.
        """
        parameters = list(self._precision.main_params(optimizer))
        self.layout.check_synced(parameters, "fabric.clip_gradients")
        self._precision.unscale_gradients(optimizer)
        # With a loss scaler gradients that are not finite are no error: the scaler skips that step.
        check = error_if_nonfinite and not self._precision.policy.loss_scale
        return self.layout.clip_norm(parameters, max_norm, norm_type, check)

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clamp gradients. All ranks must call this, with arguments as for `Fabric.clip_gradients`."""
        parameters = list(self._precision.main_params(optimizer))
        self.layout.check_synced(parameters, "fabric.clip_gradients")
        self._precision.unscale_gradients(optimizer)
        self.layout.clip_value(parameters, clip_val)

    def normalize_gradients(
        self, module: Module, num_items: float | int, optimizer: Optimizer | None = None
    ) -> float | int:
        """Scale gradients, which are means over ranks of summed losses, to those of the sum of all losses
        divided by the number of all items. Return that number. All ranks must call this.

        Args:
            module: The user's module, whose gradients are divided.
            num_items: This rank's number of items.
            optimizer: Divide the gradients of its parameters instead.
        """
        from fabric.strategies.items import total_items

        parameters = list(
            module.parameters() if optimizer is None else self._precision.main_params(optimizer)
        )
        for normalizing in self.hooks["normalizing"]:
            normalizing(parameters)
        try:
            self.layout.check_synced(parameters, "fabric.normalize_gradients")
        except CollectiveMismatch:  # raised on all ranks already
            raise
        except FabricError as error:
            self.abort_call("normalize_gradients", error)
        shard, shards = self.data_rank
        # All ranks, not only one per data shard: an error on one rank must be raised on all.
        models = names_of_owners(parameters, self.modules) if self.topology.world_size > 1 else ""
        if total := total_items(num_items, shard, self.channel(), models):
            self.layout.divide_gradients(parameters, total / shards)
        return total

    def _decide_backward(self) -> None:
        """Decide which functions forward and backward call; with `plain_backward` only `loss.backward()`."""
        self._precision_converts = overridden(type(self._precision), Precision, *CONVERSIONS)
        self._precision_backward = self._precision.needs_backward
        kind, layout = type(self), type(self.layout)
        self._changed_backward = self._precision_backward or overridden(kind, Strategy, "backward")
        self._refuses_backward = self._changed_backward or self.layout.traits.owns_backward
        self.plain_backward = not (self._changed_backward or overridden(layout, Layout, "backward"))
        own = overridden(layout, Layout, "method_plan", "model_method")
        self.plain_methods = not (self._refuses_backward or own or overridden(kind, Strategy, "method_plan"))

    def _guarded(self, plan: Callable[..., Any]) -> Callable[..., Any]:
        """Return the plan with outputs that raise in a plain `loss.backward()`."""
        from fabric.forward import GuardedForward

        return GuardedForward(plan, self.gate)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this class's names in `strategy_registry`."""
