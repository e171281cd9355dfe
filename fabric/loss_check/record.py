"""Records of the first two steps: calls of set-up models, losses, and gradients of means in place."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fabric.core._torch import base_of, in_function_transform, node_number
from fabric.core.backward_listeners import add_backward_listener
from fabric.core.source import user_line
from fabric.core.tree import flatten
from fabric.data.loader import sharded_iterations
from fabric.loss_check._torch import do_nothing, unwatch_compiled, watch_compiled, wrap_compiled_call
from fabric.loss_check.in_place import reaches_any
from fabric.loss_check.nonlinear import nonlinear_part
from fabric.loss_check.row_dims import layers_of
from fabric.loss_check.terms import Term, terms_of
from fabric.replicas.digest import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

NUM_CALLS = 2
"""Calls of each model whose batches are compared. Two, since a loop that trains on one batch only has equal
batches on all ranks, in both.
"""
MAX_LOSSES = 4
"""Largest number of losses of a step that are recorded twice."""
MAX_CALLS = 64
"""Largest number of calls whose rows are recorded."""
_MAX_MEANS = 64
"""Largest number of gradients of means that are recorded."""
_PLAIN = (torch.Tensor, int, float, str, type(None))
"""Values that contain no tensors but themselves."""


class FirstSteps:
    """The record of this rank, until ranks compare it. A backward listener."""

    def __init__(self, replicas: int = 1, splits_parameters: bool = False) -> None:
        self.replicas = replicas
        """Number of ranks that share a batch."""
        self.splits_parameters = splits_parameters
        """Whether parameters are shards, which are no leaves of graphs: then a loss of a stored tensor, of a
        method or of a compiled call is not recognised."""
        self.active = True
        """Whether calls, losses and gradients are recorded now."""
        self.awaits_loss = True
        """Whether a model was called after the last recorded loss. Other losses are not of these models, and
        ranks may have different numbers of them. True also if no call is known: `torch.compile` hides calls.
        """
        self.calls: list[FirstCalls] = []
        """The first calls of each model, in the order of setup."""
        self.losses: list[list[Term]] = []
        """The terms of the first losses; none if one is unknown."""
        self.called: list[list[FirstCalls]] = []
        """The models that were called before each loss, since the one before it."""
        self.since: list[FirstCalls] = []
        """The models that were called since the last loss."""
        self.values: list[Any] = []
        """The first losses; None: no scalar."""
        self.outputs: set[int] = set()
        """Numbers of the graph nodes of all outputs of recorded calls."""
        self.hides_outputs = False
        """Whether a call returned an object, so that a loss of it may lead to no such node. Of sharded models
        also if it returned no output with a graph, or was compiled."""
        self.rows = 0
        """Rows of a batch of a loader that was set up, as the inputs of the models have them; 0: unknown."""
        self.row_outputs: set[int] = set()
        """The nodes of outputs with these rows."""
        self.samples_even = True
        """Whether loaders gave all ranks equal numbers of samples in each call. Sizes that differ then are
        no samples: nodes of graphs, steps of time."""
        self.nonlinear: list[str] = []
        """Of each recorded loss what makes it no mean over rows; "": nothing known."""
        self.means: list[tuple[str, str, Tensor, Tensor]] = []
        """(label of the reduction, line, sum, sum of magnitudes) of gradients through means in place."""
        add_backward_listener(self)

    def add_model(self, wrapped: Any) -> None:
        """Record the first calls of a model, as `fabric.setup` returns it."""
        self.calls.append(FirstCalls(wrapped, self))

    def normalize(self, parameters: set[int]) -> None:
        """Mark models with one of these parameters, by id: the loop divides by the number of their items."""
        for calls in self.calls:
            model = calls.model()
            if model is not None and any([id(p) in parameters for p in model.parameters()]):
                calls.is_normalized = True

    def finish(self) -> None:
        """Stop recording, and restore the forwards of all models."""
        self.active = False
        for calls in self.calls:
            calls.restore_forward()

    def around_pass(self, run: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Record the factors of the loss, whose graph the backward frees, and run the backward."""
        roots = [*tensors] if isinstance(tensors, list | tuple) else [tensors]
        is_loss = len(roots) == 1 and isinstance(roots[0], torch.Tensor) and not roots[0].dim()
        recording = self.active and self.awaits_loss and len(self.losses) < NUM_CALLS * MAX_LOSSES
        if (inputs := kwargs.get("inputs")) is not None:  # without parameters: no gradient is averaged
            recording = recording and any([isinstance(one, torch.nn.Parameter) for one in inputs])
        # One rank may run a backward that is of none of these models.
        known = any([calls.sizes for calls in self.calls])
        if recording and (self.hides_outputs or not known or reaches_any(roots, self._of_models())):
            self.awaits_loss = not known
            self.losses.append(terms_of(roots[0].grad_fn) if is_loss else [])
            self.called.append(self.since)
            self.since = []
            self.values.append(roots[0].detach() if is_loss else None)
            self.nonlinear.append(self._nonlinear_part(roots[0].grad_fn) if is_loss else "")
        run(tensors, *args, **kwargs)

    def _nonlinear_part(self, root: Any) -> str:
        """Return what makes a loss no mean over rows of the batch; "": nothing known."""
        if self.rows < 2 or root is None:
            return ""
        of_forward = node_number(root) in self.outputs
        return nonlinear_part(root, layers_of(root) if of_forward else self.row_outputs, self.rows)

    def _of_models(self) -> set[int]:
        """Return the numbers of the outputs' nodes, and of parameters whose gradients a loss may compute."""
        models = [model for calls in self.calls if (model := calls.model()) is not None]
        return self.outputs | {id(parameter) for model in models for parameter in model.parameters()}

    def after_nested_pass(self) -> None:
        """Do nothing: a nested pass is a part of the loss."""

    def watch_mean(self, tensor: Tensor, label: str) -> None:
        """Record the gradient of a tensor, before its mean over ranks is written into it."""
        if tensor.dim() and len(self.means) < _MAX_MEANS:  # a number may be the loss, scaled after a log
            tensor.register_hook(partial(self._record_mean, label, user_line()))

    def _record_mean(self, label: str, line: str, grad: Tensor) -> None:
        if self.active:
            grad = torch.view_as_real(grad.detach()) if grad.is_complex() else grad.detach()
            self.means.append((label, line, grad.sum(), grad.abs().sum()))


class FirstCalls:
    """The first training calls of one set-up model, which it refers to weakly.

    Args:
        wrapped: The model, whose forward records calls from now on.
        steps: Calls are recorded while its `active` is True.
    """

    def __init__(self, wrapped: Any, steps: FirstSteps) -> None:
        attributes = vars(wrapped)
        forward = attributes["forward"] = _RecordingForward(attributes["forward"], self)
        attributes["compile"] = _RecordingCompile(wrapped, self)
        watch_compiled(wrapped, _CompiledCall(self))
        # Weakly: torch's gradient hooks, which garbage collection does not see, have references back.
        self._model, self._forward, self._steps = map(weakref.ref, (wrapped, forward, steps))
        self.name = type(wrapped.module).__name__.removeprefix("FSDP")
        self.is_compiled = False
        """Whether the model was compiled after setup: its calls are recorded outside of what is traced."""
        self.digests: list[Any] = []
        """Digests of the tensors of the first two calls. Empty if Fabric shards the data, or if there are
        other objects, which may contain data of this rank."""
        self.rows: int | None = None
        """Rows of the first tensor; 0: no tensor, or Fabric shards the data; None: not called yet."""
        self.sizes: list[int] = []
        """Rows of the first tensor in each call, also if Fabric shards the data."""
        self.dims = 0
        """Dimensions of the first tensor."""
        self.is_normalized = False
        """Whether `normalize_gradients` divides the model's gradients by the number of items."""

    def model(self) -> Any:
        """Return the model, or None if it was deleted."""
        return self._model()

    def record(self, args: Any, kwargs: Any) -> None:
        """Record a call, unless enough are recorded."""
        steps = self._steps()
        if steps is None or not steps.active:
            return
        if not any([calls.sizes for calls in steps.calls]):
            # of backwards before the first call
            steps.losses, steps.values, steps.nonlinear, steps.called = [], [], [], []
        steps.awaits_loss = True
        if self not in steps.since:
            steps.since.append(self)
        if len(self.sizes) == MAX_CALLS:
            return
        even = [each.is_even(steps.replicas) for each in sharded_iterations]
        steps.samples_even &= bool(even) and all(even)
        leaves = flatten((args, kwargs))[0]
        shape = next((shape for leaf in leaves if (shape := getattr(leaf, "shape", ()))), ())
        self.sizes.append(shape[0] if shape else 0)
        if self.rows is None:
            self.rows, self.dims = 0 if sharded_iterations else self.sizes[0], len(shape)
        plain = [leaf for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout == torch.strided]
        others = [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]
        known = not (sharded_iterations or others or in_function_transform())
        if known and len(self.digests) < NUM_CALLS and any([leaf.numel() > 1 for leaf in plain]):
            self.digests.append(digest_of(plain))

    def record_outputs(self, out: Any) -> None:
        """Record the nodes of a call's outputs, by which a loss of it is recognised."""
        steps = self._steps()
        if steps is None or not steps.active:
            return
        found = flatten(out)[0]
        leaves = [leaf for leaf in found if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
        plain = found and all([isinstance(leaf, _PLAIN) for leaf in found])
        if not leaves and (steps.splits_parameters or not plain):
            steps.hides_outputs = True
        # The loop may write into an output that is a view; the loss then leads to its base.
        nodes = [tensor.grad_fn for leaf in leaves for tensor in (leaf, base_of(leaf)) if tensor is not None]
        steps.outputs.update([node_number(node) for node in nodes if node is not None])
        rows = self.sizes[-1] if len(self.sizes) < MAX_CALLS else 0
        sizes = [size for each in sharded_iterations if (size := each.batch_size)]  # 0: unknown
        batch = next((size for size in sizes if rows in (size, 2 * size)), 0)  # two views of each
        if batch > 1:
            steps.rows = batch
            plain = [leaf for leaf in leaves if not leaf.is_nested and leaf.dim() and leaf.shape[0] == rows]
            steps.row_outputs.update([node_number(leaf.grad_fn) for leaf in plain])

    def record_compiled(self, args: Any, kwargs: Any) -> None:
        """Record a call of the model that was compiled after setup."""
        self.is_compiled = True
        if (steps := self._steps()) is not None and steps.splits_parameters:
            steps.hides_outputs = True
        if torch.is_grad_enabled():
            self.record(args, kwargs)

    def restore_forward(self) -> None:
        """Restore the original forward, unless it was compiled: torch would compile the original again."""
        model, forward = self._model(), self._forward()
        if model is None or forward is None:
            return
        attributes = vars(model)
        if isinstance(attributes.get("compile"), _RecordingCompile):
            del attributes["compile"]
        unwatch_compiled(model, self.is_compiled)
        wrap_compiled_call(model, lambda call: call.call if isinstance(call, _CompiledForward) else call)
        if attributes.get("forward") is forward and self.rows is not None and not self.is_compiled:
            attributes["forward"] = forward.call


class _RecordingForward:
    """The forward of a set-up model, which records its calls.

    Not a hook of the module, since `torch.compile` would trace it.
    """

    __slots__ = ("__weakref__", "call", "calls")

    def __init__(self, call: Callable[..., Any], calls: FirstCalls) -> None:
        self.call, self.calls = call, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and run the forward."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not self.calls.is_compiled:
            self.calls.record(args, kwargs)
            out = self.call(*args, **kwargs)
            self.calls.record_outputs(out)
            return out
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of, (self.call,)  # copies and pickled models have the forward without the record


class _CompiledForward:
    """The call that `model.compile()` has made, which records its calls."""

    def __init__(self, call: Callable[..., Any], calls: FirstCalls) -> None:
        self.call, self.calls = call, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and run the compiled forward."""
        self.calls.record_compiled(args, kwargs)
        return self.call(*args, **kwargs)


class _Compile:
    """`model.compile` of a copy of a model, whose calls are not recorded."""

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model."""
        type(self.model).compile(self.model, *args, **kwargs)


class _RecordingCompile:
    """`model.compile` of a model whose calls are recorded."""

    def __init__(self, wrapped: Any, calls: FirstCalls) -> None:
        self.model, self.calls = weakref.ref(wrapped), calls

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model, and record calls of it."""
        if (model := self.model()) is not None:
            type(model).compile(model, *args, **kwargs)
            wrap_compiled_call(model, lambda call: _CompiledForward(call, self.calls))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Compile, (), {"model": self.model()}


class _CompiledCall:
    """Records calls of `torch.compile(model)`."""

    def __init__(self, calls: FirstCalls) -> None:
        self.calls = calls

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        """Record the call."""
        self.calls.record_compiled(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of, (do_nothing,)


def _forward_of(call: Any) -> Any:
    return call
