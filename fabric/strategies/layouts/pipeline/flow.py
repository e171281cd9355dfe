"""What `model(x)` and `model.pipeline_step(...)` run under a pipeline: micro-batches in, one output out."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.torch_internals import accumulates
from fabric.core.tree import flatten, unflatten
from fabric.forward import differentiable
from fabric.plugins.collectives.frames import call_of
from fabric.strategies.layouts.alike import Alike
from fabric.strategies.layouts.parts import CallParts
from fabric.strategies.layouts.pipeline.joined import Joined
from fabric.strategies.layouts.pipeline.orders import SCHEDULES, backwards, forwards
from fabric.strategies.layouts.pipeline.run import Pass
from fabric.strategies.layouts.pipeline.trial import try_rows
from fabric.utilities.dtypes import CastTo

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

    from fabric.core.precision import DtypePolicy
    from fabric.strategies.layouts.parts import Call
    from fabric.strategies.layouts.pipeline.run import Runner
    from fabric.strategies.layouts.pipeline.tied import Tied

_INTO = "micro-batches"


class Flow:
    """One model on one rank of its pipeline.

    Args:
        number: Of the model among those set up.
        module: The model.
        runner: This rank's stage and its links.
        tied: The parameters that this stage shares with others.
        count: How many micro-batches there may be.
        schedule: A key of `SCHEDULES`, for `pipeline_step`.
        policy: Of the precision.
        after: Called with this when a backward has ended on all stages.
    """

    def __init__(
        self,
        number: int,
        module: Module,
        runner: Runner,
        tied: list[Tied],
        count: int,
        schedule: str,
        policy: DtypePolicy,
        after: Callable[[Flow], None],
    ) -> None:
        self.number, self.runner, self.tied, self.count = number, runner, tied, count
        self.module, self.name = weakref.ref(module), type(module).__name__
        self.schedule, self.policy, self.after = schedule, policy, after
        self.synchronised_in = -1
        """The last backward pass at whose end ranks synchronise, or have."""
        self.retain = False
        """Whether the graph outlives the backward that runs: `fabric.backward(loss, retain_graph=True)`."""
        self._forwards = 0
        self._alike = Alike(runner.channel, number, self.name)
        self._tried = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output for the whole batch. All ranks of the pipeline, with the same batch."""
        self._meet("forward", (args, kwargs))
        self._forwards += 1
        parts = CallParts(args, kwargs, self.count, _INTO)
        if not self._tried and self.count > 1 and sum(parts.sizes) > 1 and len(parts) > 1:
            self._tried = True
            self.finish(try_rows(self.name, self.runner, parts, self.policy.compute), "forward")
        work = Pass([_detached(call) for call in parts])
        runner = self.runner
        with runner.random():
            runner.run(forwards(len(work.calls)), work)
        joined = self._join(work, parts)
        told = self._report(work, joined)
        self.finish(work, "forward")
        runner.random.go_on()
        record = Record(self, work, joined, parts, self._forwards, (args, kwargs))
        leaves, spec = flatten(told)
        if torch.is_grad_enabled():
            leaves = record.connect(leaves)
        return unflatten(leaves, spec, told)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UsageError(
            f"{self.name} is set up as stages of a pipeline and cannot be copied: its links to other ranks "
            "cannot. Copy the model before fabric.setup, and set the copy up, too."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__({})

    def pipeline_step(
        self,
        x: Any,
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> Tensor:
        """Forward, loss and backward in the order of the strategy's schedule; gives the loss, on all ranks.

        In place of `loss = loss_fn(model(x), target)` and `fabric.backward(loss)`. No rank ever holds the
        output of the whole batch, and with "1f1b" stages hold fewer activations. Under `no_grad` it gives the
        loss alone. All ranks of the pipeline must call this, with the same data.

        Args:
            x: What the model is called with, shape (rows, ...).
            target: What `loss_fn` gets beside the output of each micro-batch, shape (rows, ...).
            loss_fn: (output, target) -> loss of one micro-batch, one element. Called on the last stage.
            reduction: "mean" or "sum": what `loss_fn` makes of the rows. Gradients are then those of the loss
                of the whole batch, also where micro-batches have different numbers of rows.
            kwargs: Keyword arguments of the model.

        A mean over something else than rows (over the tokens that are not padding, with weights of classes)
        is none of the two: let `loss_fn` sum, write reduction="sum", and then
        `fabric.normalize_gradients(model, count)`.

        Returns:
            The loss of the whole batch, shape (), without a graph.

        Raises:
            ConfigurationError: `reduction` is neither; tensors differ in their number of rows.
            ArgumentTypeError: `loss_fn` is no function.
            UsageError: An input requires a gradient: it would not get one. The loss requires none.
            RankError: A stage has failed.
        """
        if reduction not in ("mean", "sum"):
            raise ConfigurationError(f"reduction={reduction!r} is neither 'mean' nor 'sum'.")
        if not callable(loss_fn):
            raise ArgumentTypeError(
                "pipeline_step takes loss_fn as a function (output, target) -> loss, but got "
                f"{loss_fn!r:.80}."
            )
        self._meet("pipeline_step", (x, target, kwargs))
        if torch.is_grad_enabled() and differentiable((x, target, kwargs)):
            raise UsageError(
                "An argument of pipeline_step requires a gradient, which it would not get. Call model(x), "
                "and fabric.backward with the loss, where something before the pipeline is trained, too."
            )
        parts = CallParts((x, target), kwargs, self.count, _INTO)
        cut = list(parts)
        weights = [size / sum(parts.sizes) if reduction == "mean" else 1.0 for size in parts.sizes]

        def loss(index: int, out: Any) -> Tensor:
            needed = bool(differentiable(out))
            with torch.autocast(self.runner.channel.wire.device.type, enabled=False):
                cast = out if self.policy.output is None else CastTo(self.policy.output)(out)
                value = loss_fn(cast, cut[index][0][1])
            return _checked_loss(value, needed) * weights[index]

        work = Pass([_detached(((args[0],), named)) for args, named in cut], loss)
        runner, count = self.runner, len(cut)
        order = SCHEDULES[self.schedule](runner.stage.index, runner.stage.count, count)
        if not torch.is_grad_enabled():
            order = forwards(count)
        with runner.random():
            runner.run(order, work)
        total = None
        if runner.stage.is_last and work.failed is None:
            total = torch.stack([work.outputs[index].detach() for index in range(count)]).sum()
        total = runner.report(work, runner.stage.count - 1, total)
        runner.report(work, 0, [])
        self.finish(work, "pipeline_step")
        runner.random.go_on()
        if torch.is_grad_enabled():
            self.after(self)
        result: Tensor = total
        return result

    def finish(self, work: Pass, doing: str) -> None:
        """End a pass; raises on all ranks if a stage has failed."""
        try:
            self.runner.finish(work, f"{doing} of {self.name}")
        except BaseException:
            for tied in self.tied:
                tied.forget()  # it must not come into the next backward
            raise

    def _meet(self, verb: str, data: Any) -> None:
        if torch.is_grad_enabled():
            for tied in self.tied:
                tied.arm()
        # The first stage takes the input, the last one the target: of two batches nobody would notice.
        self._alike.meet(verb, *flatten(data))

    def _join(self, work: Pass, parts: CallParts) -> Joined | None:
        """The output of all micro-batches, on the last stage."""
        if not self.runner.stage.is_last or work.failed is not None:
            return None
        try:
            outputs = [work.outputs.pop(index) for index in range(len(work.calls))]
            return Joined(outputs, parts.sizes)
        except Exception as error:
            self.runner.note(error, work, "joining the outputs")
            return None

    def _report(self, work: Pass, joined: Joined | None) -> Any:
        """The output, on all ranks."""
        last, tree = self.runner.stage.count - 1, None
        if joined is not None:  # which must not keep it
            tree, joined.tree = joined.tree, None
        return self.runner.report(work, last, tree)


class Record:
    """One forward, as a backward needs it.

    Args:
        flow: Of the model.
        work: The forward pass.
        joined: Its output, on the last stage.
        parts: How its input was cut.
        number: Of the forward.
        given: What the model was called with.
    """

    def __init__(
        self, flow: Flow, work: Pass, joined: Joined | None, parts: CallParts, number: int, given: Any
    ) -> None:
        self.flow, self.joined, self.number = flow, joined, number
        self.sizes = parts.sizes
        leaves = flatten(given)[0]
        self.wanted = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.requires_grad]
        self._inputs = [leaves[i] for i in self.wanted]
        self._work: Pass | None = work
        self._places: list[int] = []

    def connect(self, leaves: list[Any]) -> list[Any]:
        """The output's leaves with this record behind those that require gradients."""
        self._places = [i for i, v in enumerate(leaves) if v is not None and v.requires_grad]
        if not self._places:
            return leaves
        anchor = torch.empty(0, requires_grad=True)
        apply: Any = _Boundary.apply
        made = apply(self, [leaves[i] for i in self._places], anchor, *self._inputs)
        self._inputs = [torch.empty(0) if v is None else v.detach() for v in self._inputs]
        out = list(leaves)
        for place, leaf in zip(self._places, made, strict=True):
            out[place] = leaf
        return out

    def backward(self, grads: tuple[Any, ...]) -> list[Any]:
        """Gradients of the inputs that want one, from those of the output. All ranks of the pipeline.

        Raises:
            UsageError: The graph is gone.
            RankError: Another stage has failed.
        """
        flow, work, runner = self.flow, self._work, self.flow.runner
        runner.channel.meet(call_of(f"backward of {flow.name}", f"forward number {self.number}"))
        if work is None:
            raise UsageError(
                f"A second backward through one forward of {flow.name}, whose activations are gone. Write "
                "fabric.backward(loss, retain_graph=True) the first time, or call the model again."
            )
        work.retain = flow.retain
        if not work.retain:
            self._work = None
        if self.joined is not None:
            given = dict(zip(self._places, grads, strict=True))
            work.grads = dict(enumerate(self.joined.split(given)))
        runner.run(backwards(len(work.calls)), work)
        found = runner.report(work, 0, self._gather(work) if runner.stage.is_first else None)
        flow.finish(work, "backward")
        if runner.stage.is_first and work.failed is None:
            found = self._gather(work)
        return list(found)

    def _gather(self, work: Pass) -> list[Any] | None:
        if work.failed is not None:
            return None
        found: list[Any] = []
        for place, whole in zip(self.wanted, self._inputs, strict=True):
            parts = [work.input_grads[index][place] for index in range(len(work.calls))]
            filled = [
                torch.zeros_like(part) if grad is None else grad
                for grad, part in zip(parts, self._cut(whole), strict=True)
            ]
            found.append(torch.cat(filled) if whole.dim() and len(filled) > 1 else sum(filled[1:], filled[0]))
        return found

    def _cut(self, whole: Tensor) -> list[Tensor]:
        if len(self.sizes) == 1 or not whole.dim():
            return [whole] * len(self.sizes)
        return list(whole.split(self.sizes))


class _Boundary(torch.autograd.Function):
    """Where autograd of the user's loop ends and the pipeline begins."""

    @staticmethod
    def forward(ctx: Any, record: Record, leaves: list[Tensor], anchor: Tensor, *inputs: Tensor) -> Any:
        ctx.record = record
        ctx.set_materialize_grads(False)
        return tuple([leaf.detach() for leaf in leaves])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        record: Record = ctx.record
        flow = record.flow
        if not accumulates():
            raise UsageError(
                f"torch.autograd.grad, or backward(inputs=...), went through {flow.name}, whose stages would "
                "accumulate into .grad of all parameters. Write fabric.backward(loss): inputs that require a "
                "gradient have it in .grad afterwards."
            )
        found = record.backward(grads)
        flow.after(flow)
        return None, None, None, *found


def _detached(call: Call) -> Call:
    """The arguments of a micro-batch, cut off from the graph outside: gradients of inputs go back by hand."""
    leaves, spec = flatten(call)
    if not any([isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]):
        return call
    own = [
        leaf.detach().requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
        for leaf in leaves
    ]
    made: Call = unflatten(own, spec, call)
    return made


def _checked_loss(value: Any, needed: bool) -> Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"loss_fn returned {shape}, but pipeline_step needs one number. Reduce it to the mean over the "
            "rows, or to their sum with reduction='sum'."
        )
    if needed and not value.requires_grad:
        raise UsageError(
            "loss_fn returned a loss that does not require a gradient, though the output does, so nothing "
            "would be trained. Leave out what cuts it off (detach(), item(), no_grad)."
        )
    return value.reshape(())
