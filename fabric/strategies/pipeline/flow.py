"""Forward and `pipeline_step` of a model under a pipeline: micro-batches in, one output out."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fabric.collectives.frames import call_of
from fabric.core.compile import eager
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.tree import flatten, map_tree, unflatten
from fabric.forward import differentiable
from fabric.precision.dtypes import CastTo
from fabric.strategies.buffers import SyncedBuffers
from fabric.strategies.data_parallel.parts import MicrobatchArgs
from fabric.strategies.input_check import InputConsistencyCheck
from fabric.strategies.pipeline._torch import accumulates, keeps_graph
from fabric.strategies.pipeline.run import Pass, alternating, backwards, forwards
from fabric.strategies.pipeline.trial import joined, try_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

    from fabric.core.precision import DtypePolicy
    from fabric.strategies.pipeline.run import Runner
    from fabric.strategies.pipeline.states import Tied

_INTO = "micro-batches"


class Flow:
    """One model on one rank of its pipeline.

    Args:
        number: Of the model among those set up.
        module: The model.
        runner: This rank's stage and its links.
        tied: The parameters that this stage shares with others.
        count: How many micro-batches there may be.
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
        policy: DtypePolicy,
        after: Callable[[Flow], None],
    ) -> None:
        self.runner, self.tied, self.count = runner, tied, count
        self.module, self.name = weakref.ref(module), type(module).__name__
        self.buffers = SyncedBuffers(module)
        self.policy, self.after = policy, after
        self.synchronised_in = -1
        """The last backward pass at whose end ranks synchronise, or have."""
        self._forwards = 0
        self._alike = InputConsistencyCheck(runner.channel, number, self.name)
        self._tried = False

    @eager  # torch.compile around the model would take apart the messages; blocks are compiled all the same
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output for the whole batch. All ranks of the pipeline, with the same batch."""
        self._meet("forward", (args, kwargs))
        self._forwards += 1
        parts = MicrobatchArgs(args, kwargs, self.count, _INTO)
        if not self._tried and self.count > 1 and sum(parts.sizes) > 1 and len(parts) > 1:
            self._tried = True
            try_rows(self.name, self.runner, parts, self.policy.compute)
        calls = list(parts)
        work = Pass([map_tree(_cut_off, call) for call in calls], number=self._forwards)
        runner = self.runner
        with runner.random():
            runner.run(forwards(len(calls)), work)
        here, out = runner.stage.is_last, None
        if here and work.failed is None:
            try:
                outputs = [work.outputs.pop(index) for index in range(len(calls))]
                out = joined(self._connected(outputs, work, calls), parts.sizes)
            except Exception as error:
                runner.note(error, work, "joining the outputs")
        told = runner.report(work, runner.stage.count - 1, out)
        self.finish(work, "forward")
        runner.random.advance()
        return out if here else self._connected(told, work, calls)

    def backward(self, work: Pass, grads: tuple[Any, ...]) -> list[Any]:
        """Gradients of the inputs that want one, micro-batch by micro-batch. All ranks of the pipeline.

        Args:
            work: The forward.
            grads: Of the outputs that want one, on the last stage.

        Raises:
            UsageError: The graph is gone.
            RankError: Another stage has failed.
        """
        runner = self.runner
        runner.channel.check_call(call_of(f"backward of {self.name}", f"forward number {work.number}"))
        if not work.kept:
            raise UsageError(
                f"A second backward through one forward of {self.name}, whose activations are gone. Write "
                "fabric.backward(loss, retain_graph=True) the first time, or call the model again."
            )
        work.retain = keeps_graph()
        if runner.stage.is_last:
            given = iter(grads)
            work.grads = {
                index: [None if edge is None else next(given) for edge in work.kept[index].outputs]
                for index in range(len(work.calls))
            }
        runner.run(backwards(len(work.calls)), work)
        found = None
        if runner.stage.is_first and work.failed is None:
            made = [grad for index in range(len(work.calls)) for grad in work.input_grads.pop(index)]
            found = [
                grad for grad, leaf in zip(made, flatten(work.calls)[0], strict=True) if _needs_grad(leaf)
            ]
        found = runner.report(work, 0, found)
        if not work.retain:
            work.kept.clear()
        self.finish(work, "backward")
        return list(found)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{self.name} is set up as stages of a pipeline and cannot be copied: its links to other ranks "
            "cannot. Copy the model before fabric.setup, and set the copy up, too."
        )

    @eager
    def pipeline_step(
        self,
        x: Any,
        target: Any,
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        reduction: str = "mean",
        **kwargs: Any,
    ) -> Tensor:
        """Forward, loss and backward of one micro-batch after the other (1F1B); gives the loss, on all ranks.

        In place of `loss = loss_fn(model(x), target)` and `fabric.backward(loss)`. No rank ever holds the
        output of the whole batch, and stages hold fewer activations. Under `no_grad` it gives the loss alone.
        All ranks of the pipeline must call this, with the same data.

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
        parts = MicrobatchArgs((x, target), kwargs, self.count, _INTO)
        cut = list(parts)
        weights = [size / sum(parts.sizes) if reduction == "mean" else 1.0 for size in parts.sizes]

        def loss(index: int, out: Any) -> Tensor:
            needed = bool(differentiable(out))
            with torch.autocast(self.runner.channel.transport.device.type, enabled=False):
                cast = out if self.policy.output is None else CastTo(self.policy.output)(out)
                value = loss_fn(cast, cut[index][0][1])
            return _checked_loss(value, needed) * weights[index]

        work = Pass([((args[0],), named) for args, named in cut], loss)
        runner, count, trains = self.runner, len(cut), torch.is_grad_enabled()
        stage = runner.stage
        with runner.random():
            runner.run(alternating(stage.index, stage.count, count) if trains else forwards(count), work)
        total = None
        if stage.is_last and work.failed is None:
            total = torch.stack([work.outputs[index].detach() for index in range(count)]).sum()
        total = runner.report(work, stage.count - 1, total)
        runner.report(work, 0, None)
        self.finish(work, "pipeline_step")
        runner.random.advance()
        if trains:
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
        self._alike.compare(verb, *flatten(data))

    def _connected(self, tree: Any, work: Pass, calls: list[Any]) -> Any:
        """The tree, with the backward of a pass behind the leaves that require gradients."""
        leaves, spec = flatten(tree)
        wanted = [leaf for leaf in leaves if _needs_grad(leaf)]
        if not wanted:
            return tree
        inputs = [leaf for leaf in flatten(calls)[0] if _needs_grad(leaf)]
        apply: Any = _Boundary.apply
        made = iter(apply(self, work, wanted, torch.empty(0, requires_grad=True), *inputs))
        return unflatten([next(made) if _needs_grad(leaf) else leaf for leaf in leaves], spec, tree)


class _Boundary(torch.autograd.Function):
    """Boundary between autograd of the user's loop and the pipeline.

    It lies between the parts of the model's inputs and the parts of its output. On ranks that did not
    compute the output, the output itself takes the place of its parts.
    """

    @staticmethod
    def forward(
        ctx: Any, flow: Flow, work: Pass, leaves: list[Tensor], anchor: Tensor, *inputs: Tensor
    ) -> Any:
        ctx.flow, ctx.work = flow, work
        ctx.set_materialize_grads(False)
        return tuple([leaf.detach() for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flow: Flow = ctx.flow
        if not accumulates():
            raise UsageError(
                f"torch.autograd.grad, or backward(inputs=...), went through {flow.name}, whose stages would "
                "accumulate into .grad of all parameters. Write fabric.backward(loss): inputs that require a "
                "gradient have it in .grad afterwards."
            )
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True cannot go through a pipeline: the graph of the gradients would be spread "
                'over its stages. Leave it out, or use strategy="ddp".'
            )
        found = flow.backward(ctx.work, grads)
        flow.after(flow)
        return None, None, None, None, *found


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _cut_off(leaf: Any) -> Any:
    """An argument without the graph outside: its gradient goes back through `_Boundary`."""
    return leaf.detach().requires_grad_() if _needs_grad(leaf) else leaf


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
