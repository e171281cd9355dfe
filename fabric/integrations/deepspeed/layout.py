"""`DeepSpeedLayout`: each model with its optimizer is a DeepSpeed engine."""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from fabric.checkpoint.portable import read_stored
from fabric.collectives.frames import call_of
from fabric.core.errors import ConfigurationError, UsageError
from fabric.core.traits import Traits
from fabric.core.tree import map_tree
from fabric.forward import NotifyingForward
from fabric.integrations.deepspeed import states
from fabric.integrations.deepspeed.calls import CheckedCall
from fabric.integrations.deepspeed.gradients import Gradients, disable_backward_hooks, has_optimizer
from fabric.integrations.deepspeed.precision import PRECISIONS, WHY
from fabric.strategies.layout import Layout
from fabric.strategies.norms import norm_over_ranks
from fabric.strategies.plain import FOREIGN_PACKAGES
from fabric.strategies.zero1.shares import optimizer_view
from fabric.wrappers import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer


class DeepSpeedLayout(Layout):
    """Layout of models that are DeepSpeed engines.

    The user's optimizer keeps the model's parameters and their settings; the engine steps a copy of it with
    DeepSpeed's parameters. The engine accumulates the gradients of all backwards until a step or
    `zero_grad`; `.grad` is None. They are averaged over ranks before they are clipped, divided or used.

    Args:
        stage: 1, 2 or 3.
    """

    traits = Traits(
        needs_launch=True,
        data_parallel=True,
        owns_backward=True,
        precisions=PRECISIONS,
        precisions_why=WHY,
        splits_optimizers=True,
        places_models=True,
        replicates=(),
    )

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.traits = replace(self.traits, splits_parameters=stage == 3)
        self.config: dict[str, Any] = {}
        """The complete configuration of an engine, set by the strategy."""
        self.engines: dict[Any, Any] = {}
        """{user's module: its engine}."""
        self._gradients: dict[Any, Gradients] = {}
        """{engine with an optimizer: its gradients}."""
        self._stepped: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._runs = self._failed = self._gathers = False

    def __getstate__(self) -> dict[str, Any]:
        return {"stage": self.stage}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def make(self, module: Module, optimizer: Optimizer | None) -> Any:
        """Create the engine of a model and its optimizer. All ranks must call this.

        Raises:
            ConfigurationError: DeepSpeed does not support the parameters or the optimizer.
        """
        import deepspeed

        _check(module, optimizer)
        twin = None
        if optimizer is not None:
            groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
            twin = optimizer_view(optimizer, param_groups=groups, state=defaultdict(dict))
            vars(twin).pop("step", None)  # a scheduler binds it to the user's optimizer
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=twin, config=self.config, dist_init_required=False
        )
        self.engines[module] = engine
        disable_backward_hooks(engine)
        engine.__deepcopy__ = _refuse_copy
        if self.traits.splits_parameters:
            module.register_state_dict_pre_hook(self._check_gathering)
        if has_optimizer(engine):
            self._register(engine, optimizer if optimizer is not None else _optimizer_made_by(engine))
        return engine

    def optimizer_of(self, module: Module) -> Optimizer:
        """Return the optimizer that DeepSpeed created for a model by its configuration.

        Raises:
            ConfigurationError: The configuration has none.
        """
        for optimizer, engine in self._stepped.items():
            if engine.module is module:
                return optimizer
        raise ConfigurationError(
            'DeepSpeed\'s config has no "optimizer". Write one there, or model, optimizer = '
            "fabric.setup(model, optimizer)."
        )

    def stepped_engines(self) -> list[Any]:
        """Return the engines that have an optimizer."""
        return list(self._gradients)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that belongs to an engine.

        Raises:
            ConfigurationError: It belongs to no engine.
        """
        self._engine(optimizer)
        return optimizer

    def _engine(self, optimizer: Optimizer) -> Any:
        if optimizer not in self._stepped:
            raise ConfigurationError(
                "DeepSpeed makes its engine of a model and its optimizer together. Write model, optimizer = "
                "fabric.setup(model, optimizer)."
            )
        return self._stepped[optimizer]

    def check_added(self, parameters: list[Tensor]) -> None:
        """Raise: parameters cannot be added to an engine."""
        raise UsageError(
            "add_param_group() came after setup, and a DeepSpeed engine has the parameters of setup. Give "
            "the optimizer all its parameters before."
        )

    def unwrap(self, wrapped: Module) -> Module:
        """Return the user's module inside an engine."""
        return wrapped.module if wrapped in self.engines.values() else wrapped  # type: ignore[return-value]

    def forward_plan(self, wrapped: Module) -> Callable[..., Any]:
        """Return the engine's call, with hooks on its outputs for backward."""
        return self._hooked(wrapped.__call__, wrapped)

    def method_plan(
        self, wrapped: Module, method: Callable[..., Any], marked: bool = False
    ) -> Callable[..., Any]:
        """Return the method, with hooks on its outputs for backward."""
        return self._hooked(method, wrapped, f".{method.__name__}")

    def _hooked(self, call: Callable[..., Any], wrapped: Any, name: str = "") -> Callable[..., Any]:
        if wrapped not in self.engines.values():
            return call
        if self.traits.splits_parameters:
            call = CheckedCall(call, self, type(wrapped.module).__name__ + name)
        return NotifyingForward(call, self, wrapped)

    def on_reached(self, engine: Any) -> None:
        """Handle a backward that reached an output of the engine; ignore `torch.autograd.grad`."""
        if self._runs and engine in self._gradients:
            self._gradients[engine].reach()

    def backward(self, run: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward pass, which adds to the gradients of the engines that it reaches.

        Raises:
            UsageError: It reaches no engine; it retains the graph under stage 3; or an earlier backward
                failed.
        """
        if self.traits.splits_parameters and (kwargs.get("retain_graph") or kwargs.get("create_graph")):
            raise UsageError(
                "fabric.backward(loss, retain_graph=True): under stage 3 DeepSpeed frees weights that a "
                "second backward of this graph needs. Add the losses and call fabric.backward once, or "
                "write stage=2."
            )
        if self._failed:
            raise UsageError(
                "A backward before this one failed in the middle, so DeepSpeed's engine has only a part of "
                "its gradients. Restart the process from a checkpoint."
            )
        if self.traits.splits_parameters and self.channel is not None:
            self.channel.check_barrier("backward")
        for gradients in self._gradients.values():
            gradients.begin()
        self._runs = self._failed = True
        try:
            run(tensor, *args, **kwargs)
        finally:
            self._runs = False
        self._failed = False
        if not any([gradients.end() for gradients in self._gradients.values()]):
            raise UsageError(
                "This loss comes from no model that was set up with an optimizer, or from its .module: "
                "DeepSpeed averages no gradients of it. Write model, optimizer = fabric.setup(model, "
                "optimizer), and call the model that it returned."
            )

    def engine_of(self, parameters: Iterable[Tensor]) -> Any:
        """Return the engine that has any of these parameters; None: no engine has."""
        ids = {id(p) for p in parameters}
        return next((e for m, e in self.engines.items() if ids & {id(p) for p in m.parameters()}), None)

    def engines_in(self, state: Any) -> list[Any]:
        """Return the names of a state's models that are engines."""
        entries = state if isinstance(state, dict) else {}
        inner = {key: unwrap(value) for key, value in entries.items()}
        return [key for key, value in inner.items() if isinstance(value, Module) and value in self.engines]

    def steps(self, optimizer: Any, engine: Any) -> bool:
        """Whether this is the optimizer of an engine."""
        return isinstance(optimizer, torch.optim.Optimizer) and self._stepped.get(optimizer) is engine

    def drop(self, engine: Any) -> None:
        """Clear the gradients of an engine."""
        self._gradients[engine].drop()

    def loaded(self, engine: Any, optimizer: Optimizer | None) -> None:
        """Update records after the engine loaded a checkpoint; with `optimizer` also its settings."""
        self._record_versions(engine)
        if optimizer is not None:
            self._copy_settings_from(engine, optimizer)

    def check_synced(self, parameters: Iterable[Tensor], doing: str) -> None:
        """Average gradients before they are clipped or divided. All ranks must call this."""
        self._of(parameters).finish()

    def total_norm(self, parameters: list[Tensor], norm_type: float) -> tuple[list[Tensor], Tensor]:
        """Return this rank's gradient shards, and the norm of the whole model. All ranks must call this."""
        parts, scale = self._of(parameters).parts()
        channel: Any = self.channel
        norm = norm_over_ranks(
            [(parts, [channel.collective.group])], norm_type, channel.transport.staging_device
        )
        return parts, (norm / scale).to(torch.float32)

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value]."""
        parts, scale = self._of(parameters).parts()
        for part in parts:
            part.clamp_(-clip_value * scale, clip_value * scale)

    def divide_gradients(self, parameters: Iterable[Tensor], divisor: float) -> None:
        """Divide every gradient by `divisor`, in place."""
        for part in self._of(parameters).parts()[0]:
            part.div_(divisor)

    def step(self, optimizer: Optimizer) -> None:
        """Step the engine; without gradients do nothing. All ranks must call this."""
        engine, channel = self._engine(optimizer), self.channel
        gradients = self._gradients[engine]
        if channel is not None and channel.world_size > 1:
            which = "gradients" if gradients.exist else "no gradients"
            channel.check_call(call_of(f"{type(optimizer).__name__}.step", f"with {which}"))
        self._copy_edits_to_masters(engine)
        engine_groups = engine.optimizer.optimizer.param_groups
        for engine_group, group in zip(engine_groups, optimizer.param_groups, strict=False):
            engine_group.update(_settings(group))
        if gradients.step():
            self._copy_settings_from(engine, optimizer)  # a scheduler of DeepSpeed's may have changed them
            self._record_versions(engine)

    def init_context(self, empty_init: bool | None) -> AbstractContextManager[Any]:
        """Context for module construction; under stage 3 it shards modules as they are constructed."""
        if self.stage != 3:
            return super().init_context(empty_init)
        import deepspeed

        return deepspeed.zero.Init(config_dict_or_path=self.config)  # type: ignore[no-any-return]

    def plain_module(self, module: Module, keep: bool, device: torch.device) -> Module | None:
        """Return the user's module as it would be on one rank. All ranks must call this."""
        if self.stage != 3:
            return module if keep else None
        FOREIGN_PACKAGES.add("deepspeed.")
        return super().plain_module(module, keep, device)

    def full_tensors(self, module: Module) -> dict[str, Tensor]:
        """Return the full parameters of a sharded module. All ranks must call this."""
        return {name: states.full_value(p) for name, p in module.named_parameters(remove_duplicate=False)}

    def module_state(self, module: Module) -> dict[str, Any]:
        """Return the full state dict, with the values of the master weights. All ranks must call this."""
        if self.engines.get(module) in self._gradients:
            self._copy_edits_to_masters(self.engines[module])
        with self.gathers():
            return states.module_state(module, self.keeps_full)

    @contextmanager
    def gathers(self) -> Iterator[None]:
        """Context in which state dicts of the user's modules are allowed, since values are gathered."""
        self._gathers = True
        try:
            yield
        finally:
            self._gathers = False

    def load_module_state(self, module: Module, state: dict[str, Any], strict: bool) -> Any:
        """Load a full state dict, also into the master weights. All ranks must call this."""
        result = states.load_module_state(module, map_tree(read_stored, state), strict)
        if module in self.engines:
            self._record_versions(self.engines[module])
        return result

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full state of an optimizer. All ranks must call this."""
        return states.optimizer_state(optimizer, self._engine(optimizer), self.keeps_full)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load a full state, of any strategy. All ranks must call this."""
        states.load_optimizer_state(optimizer, self._engine(optimizer), map_tree(read_stored, state))

    def teardown(self) -> None:
        """Destroy the engines."""
        for engine in self.engines.values():
            engine.destroy()
        self.engines.clear()
        self._gradients.clear()

    def _register(self, engine: Any, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = self._gradients[engine] = Gradients(engine, parameters)
        optimizer.zero_grad = engine.module.zero_grad = gradients.drop  # type: ignore[method-assign]
        self._stepped[optimizer] = engine
        engine.fabric_optimizer = optimizer  # the only strong reference to one that DeepSpeed created
        self._record_versions(engine)

    def _of(self, parameters: Iterable[Tensor]) -> Gradients:
        engine = self.engine_of(parameters)
        if engine not in self._gradients:
            raise UsageError(
                "These parameters are of no model that was set up with an optimizer, and DeepSpeed has no "
                "gradients of others. Write model, optimizer = fabric.setup(model, optimizer)."
            )
        return self._gradients[engine]

    def _copy_settings_from(self, engine: Any, optimizer: Optimizer) -> None:
        engine_groups = engine.optimizer.optimizer.param_groups
        for group, engine_group in zip(optimizer.param_groups, engine_groups, strict=False):
            group.update(_settings(engine_group))

    def _record_versions(self, engine: Any) -> None:
        engine.fabric_versions = [p._version for p in engine.module.parameters()]

    def _copy_edits_to_masters(self, engine: Any) -> None:
        """Copy the user's in-place changes of parameters since the last step to the master weights."""
        whole = not (self.config["fp16"]["enabled"] or self.config["bf16"]["enabled"])
        whole = whole and not self.traits.splits_parameters
        # In unsharded float32 it always copies: `param.data` changes leave the version as it is.
        if not whole and engine.fabric_versions == [p._version for p in engine.module.parameters()]:
            return
        if self.traits.splits_parameters:
            raise UsageError(
                "Parameters were written by hand, and under stage 3 their values are sharded elsewhere: "
                "nothing was changed. Write stage=2, or load the new values with fabric.load_raw."
            )
        engine.optimizer.refresh_fp32_params()

    def _check_gathering(self, module: Module, *_: Any) -> None:
        if not self._gathers:
            raise UsageError(
                f"The state dict of a bare {type(module).__name__} has no values under stage 3. Call "
                "state_dict() of the model that fabric.setup returned, on all ranks."
            )


def _check(module: Module, optimizer: Optimizer | None) -> None:
    """Raise if DeepSpeed does not support the module or the optimizer."""
    for name, p in module.named_parameters():
        if not (hasattr(p, "ds_id") or (p.dim() and p.is_contiguous())):
            raise ConfigurationError(
                f"DeepSpeed takes no parameter of shape {list(p.shape)} with strides {list(p.stride())}: "
                f"{name}. Give it a dimension, and contiguous memory (p.data = p.data.contiguous())."
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS needs a closure, but DeepSpeed's step calls none. Write another optimizer, or "
            'write strategy="ddp".'
        )
    for group in [] if optimizer is None else optimizer.param_groups:
        if not any([p.requires_grad for p in group["params"]]):
            raise ConfigurationError(
                "A group of the optimizer has no parameter that requires a gradient, which DeepSpeed does "
                "not support. Leave the group out."
            )


def _refuse_copy(memo: dict[int, Any]) -> Any:
    raise UsageError(
        "A model that fabric.setup has made a DeepSpeed engine cannot be copied. Copy it before that, also "
        "for an average of its weights; or read the model in `with fabric.whole(model) as plain:`."
    )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _optimizer_made_by(engine: Any) -> Optimizer:
    """Return the optimizer that DeepSpeed created by its configuration, with the model's parameters."""
    inner = engine.optimizer.optimizer
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    groups = [{"params": parameters, **_settings(inner.param_groups[0])}]
    view: Optimizer = optimizer_view(inner, param_groups=groups, state=defaultdict(dict))
    return view
