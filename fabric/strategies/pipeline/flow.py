"""`PipelinedModule`: forward, backward and `pipeline_step` of a whole batch, in micro-batches."""

from __future__ import annotations

import weakref
from operator import is_not
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fabric.collectives.frames import call_of
from fabric.core.compile import eager
from fabric.core.errors import ArgumentTypeError, ConfigurationError, UsageError
from fabric.core.tree import flatten, map_tree, unflatten
from fabric.forward import differentiable
from fabric.precision.precision import DefaultDtype
from fabric.strategies.buffers import SyncedBuffers
from fabric.strategies.data_parallel.parts import MicrobatchArgs
from fabric.strategies.input_check import InputConsistencyCheck
from fabric.strategies.pipeline._torch import accumulates, keeps_graph
from fabric.strategies.pipeline.cut import find_blocks, listed_blocks
from fabric.strategies.pipeline.run import PassState, all_backwards, all_forwards, one_forward_one_backward
from fabric.strategies.pipeline.trial import join_outputs, try_row_independence

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

    from fabric.precision.precision import Precision
    from fabric.strategies.pipeline.run import Runner
    from fabric.strategies.pipeline.states import TiedParameter

_UNIT = "micro-batches"


class PipelinedModule:
    """The pipelined calls of one model on one rank.

    Args:
        number: Index of the model in the order of setup.
        module: The model.
        runner: This rank's stage and its links.
        tied: The parameters that this stage shares with others.
        count: Maximum number of micro-batches.
        precision: The precision of the strategy.
        backward_ended: Called with this object when a backward has ended on all stages.
    """

    def __init__(
        self,
        number: int,
        module: Module,
        runner: Runner,
        tied: list[TiedParameter],
        count: int,
        precision: Precision,
        backward_ended: Callable[[PipelinedModule], None],
    ) -> None:
        self.runner, self.tied, self.count = runner, tied, count
        self.module, self.name = weakref.ref(module), type(module).__name__
        self.blocks = find_blocks(module)
        self.buffers = SyncedBuffers(module)
        self.precision, self.backward_ended = precision, backward_ended
        self.synchronised_in = -1
        """Id of the last backward pass at whose end ranks synchronise."""
        self._forwards = 0
        self._input_check = InputConsistencyCheck(runner.channel, number, self.name)
        self._tried = False

    @eager  # torch.compile must not trace the messages; compiled blocks stay compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for the whole batch. All ranks of the pipeline must call this, with the same
        batch.
        """
        self._check_inputs("forward", (args, kwargs))
        self._forwards += 1
        batches = MicrobatchArgs(args, kwargs, self.count, _UNIT)
        if not self._tried and self.count > 1 and sum(batches.sizes) > 1 and len(batches) > 1:
            self._tried = True
            try_row_independence(self.name, self.runner, batches, self.precision.policy.compute)
        calls = list(batches)
        state = PassState([map_tree(_detached_leaf, call) for call in calls], number=self._forwards)
        runner = self.runner
        with runner.random():
            runner.run(all_forwards(len(calls)), state)
        is_last, out = runner.stage.is_last, None
        if is_last and state.failed is None:
            try:
                outputs = [state.outputs.pop(index) for index in range(len(calls))]
                out = join_outputs(self._with_backward(outputs, state, calls), batches.sizes)
            except Exception as error:
                runner.record_failure(error, state, "joining the outputs")
        received = runner.broadcast_result(state, runner.stage.count - 1, out)
        self.finish(state, "forward")
        runner.random.advance()
        return out if is_last else self._with_backward(received, state, calls)

    def backward(self, state: PassState, grads: tuple[Any, ...]) -> list[Any]:
        """Return the gradients of the inputs that require one, in the order of micro-batches. All ranks of
        the pipeline must call this.

        Args:
            state: State of the forward.
            grads: Gradients of the outputs that require one, used on the last stage.

        Raises:
            UsageError: The graph was freed.
            RankError: Another stage failed.
        """
        runner = self.runner
        runner.channel.check_call(call_of(f"backward of {self.name}", f"forward number {state.number}"))
        if not state.saved:
            raise UsageError(
                f"A second backward went through one forward of {self.name}, whose activations are freed. "
                "Write fabric.backward(loss, retain_graph=True) the first time, or call the model again."
            )
        state.retain = keeps_graph()
        if runner.stage.is_last:
            remaining = iter(grads)
            state.grads = {
                index: [None if edge is None else next(remaining) for edge in state.saved[index].outputs]
                for index in range(len(state.calls))
            }
        runner.run(all_backwards(len(state.calls)), state)
        result = None
        if runner.stage.is_first and state.failed is None:
            per_leaf = [grad for index in range(len(state.calls)) for grad in state.input_grads.pop(index)]
            leaves = flatten(state.calls)[0]
            result = [grad for grad, leaf in zip(per_leaf, leaves, strict=True) if _needs_grad(leaf)]
        result = runner.broadcast_result(state, 0, result)
        if not state.retain:
            state.saved.clear()
        self.finish(state, "backward")
        return list(result)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            f"{self.name} is set up as stages of a pipeline and cannot be copied, since it holds connections "
            "to other ranks. Copy the model before fabric.setup, and set the copy up, too."
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
        """Run forward, loss and backward of the micro-batches by the 1F1B schedule; return the loss. All
        ranks of the pipeline must call this, with the same data.

        It replaces `loss = loss_fn(model(x), target)` and `fabric.backward(loss)`. No rank holds the output
        of the whole batch, and stages hold fewer activations. Under `no_grad` it runs no backward.

        Args:
            x: Input of the model, shape (rows, ...).
            target: Second argument of `loss_fn`, split as the output is, shape (rows, ...).
            loss_fn: (output, target) -> loss of one micro-batch, one element. Called on the last stage.
            reduction: "mean" or "sum": how `loss_fn` reduces the rows. Micro-batches with different numbers
                of rows are weighted accordingly.
            kwargs: Keyword arguments of the model.

        For a mean over something other than rows (tokens without padding, weights of classes) let `loss_fn`
        sum, pass reduction="sum", and then call `fabric.normalize_gradients(model, count)`.

        Returns:
            The loss of the whole batch, shape (), without a graph.

        Raises:
            ConfigurationError: `reduction` is unknown, or tensors differ in their number of rows.
            ArgumentTypeError: `loss_fn` is no function.
            UsageError: An argument requires a gradient, which it would not get. The loss requires none.
            RankError: Another stage failed.
        """
        if reduction not in ("mean", "sum"):
            raise ConfigurationError(f"reduction={reduction!r} is unknown. Write 'mean' or 'sum'.")
        if not callable(loss_fn):
            raise ArgumentTypeError(
                f"loss_fn={loss_fn!r:.80} is not a function. Pass a function (output, target) -> loss to "
                "pipeline_step."
            )
        self._check_inputs("pipeline_step", (x, target, kwargs))
        if torch.is_grad_enabled() and differentiable((x, target, kwargs)):
            raise UsageError(
                "An argument of pipeline_step requires a gradient, which it would not get. To train a module "
                "before the pipeline, call model(x), then fabric.backward(loss)."
            )
        precision, default = self.precision, DefaultDtype(torch.get_default_dtype())
        x, kwargs = precision.convert_input((x, kwargs))  # the target is of the loss, not of the forward
        batches = MicrobatchArgs((x, target), kwargs, self.count, _UNIT)
        calls = list(batches)
        weights = [size / sum(batches.sizes) if reduction == "mean" else 1.0 for size in batches.sizes]

        def loss(index: int, out: Any) -> Tensor:
            needs_grad = bool(differentiable(out))
            device = self.runner.channel.transport.device.type
            # As in a loop, where the loss is outside of the forward.
            with torch.autocast(device, enabled=False), default:
                value = loss_fn(precision.convert_output(out), calls[index][0][1])
            return _validate_loss(value, needs_grad) * weights[index]

        state = PassState([((args[0],), named) for args, named in calls], loss)
        runner, count, trains = self.runner, len(calls), torch.is_grad_enabled()
        stage = runner.stage
        one_f_one_b = one_forward_one_backward(stage.index, stage.count, count)
        with runner.random(), precision.forward_context():
            runner.run(one_f_one_b if trains else all_forwards(count), state)
        total = None
        if stage.is_last and state.failed is None:
            total = torch.stack([state.outputs[index].detach() for index in range(count)]).sum()
        total = runner.broadcast_result(state, stage.count - 1, total)
        runner.broadcast_result(state, 0, None)
        self.finish(state, "pipeline_step")
        runner.random.advance()
        if trains:
            self.backward_ended(self)
        result: Tensor = total
        return result

    def finish(self, state: PassState, doing: str) -> None:
        """End a pass; raise on all ranks if a stage failed."""
        try:
            self.runner.finish(state, f"{doing} of {self.name}")
        except BaseException:
            for tied in self.tied:
                tied.discard()  # else the next backward would add it
            raise

    def _check_inputs(self, verb: str, data: Any) -> None:
        if torch.is_grad_enabled():
            for tied in self.tied:
                tied.register_hook()
        self._check_blocks()
        # The first stage reads the input, the last one the target: different batches would raise no error.
        self._input_check.compare(verb, *flatten(data))

    def _check_blocks(self) -> None:
        """Raise if the model has other blocks than at setup, of which the stages would run the old ones."""
        now, before = listed_blocks(self.module()), [block for _, block in self.blocks]
        if len(now) != len(before) or any(map(is_not, now, before)):
            changed = [path for (path, block), new in zip(self.blocks, now, strict=False) if block is not new]
            what = (
                f"Block {changed[0]} of {self.name} was replaced"
                if changed
                else (f"{self.name} has {len(now)} blocks in place of {len(before)}")
            )
            raise UsageError(
                f"{what} after fabric.setup. The stages would run the blocks that it had at fabric.setup. "
                "Change the model before fabric.setup."
            )

    def _with_backward(self, tree: Any, state: PassState, calls: list[Any]) -> Any:
        """Return the tree; a backward of its leaves that require gradients runs the pipeline's backward."""
        leaves, spec = flatten(tree)
        with_grad = [leaf for leaf in leaves if _needs_grad(leaf)]
        if not with_grad:
            return tree
        inputs = [leaf for leaf in flatten(calls)[0] if _needs_grad(leaf)]
        apply: Any = _Boundary.apply
        outputs = iter(apply(self, state, with_grad, torch.empty(0, requires_grad=True), *inputs))
        return unflatten([next(outputs) if _needs_grad(leaf) else leaf for leaf in leaves], spec, tree)


class _Boundary(torch.autograd.Function):
    """Boundary between the autograd graph of the user's loop and the pipeline.

    Its inputs are the micro-batches of the model's inputs, its outputs those of the model's output. On ranks
    that received the output, it is one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flow: PipelinedModule,
        state: PassState,
        leaves: list[Tensor],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> Any:
        ctx.flow, ctx.state = flow, state
        ctx.set_materialize_grads(False)
        return tuple([leaf.detach() for leaf in leaves])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flow: PipelinedModule = ctx.flow
        if not accumulates():
            raise UsageError(
                f"torch.autograd.grad, or backward(inputs=...), went through {flow.name}, whose stages would "
                "accumulate into .grad of all parameters. Write fabric.backward(loss): inputs that require a "
                "gradient have it in .grad afterwards."
            )
        if torch.is_grad_enabled():
            raise UsageError(
                "create_graph=True went through a pipeline. Its gradients have no graph, which would cross "
                'ranks. Leave create_graph out, or use strategy="ddp".'
            )
        input_grads = flow.backward(ctx.state, grads)
        flow.backward_ended(flow)
        return None, None, None, None, *input_grads


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _detached_leaf(leaf: Any) -> Any:
    """Return an argument without its graph: `_Boundary` returns its gradient to autograd."""
    return leaf.detach().requires_grad_() if _needs_grad(leaf) else leaf


def _validate_loss(value: Any, needs_grad: bool) -> Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UsageError(
            f"loss_fn returned {shape}, but pipeline_step needs one number. Reduce it to the mean over the "
            "rows, or to their sum with reduction='sum'."
        )
    if needs_grad and not value.requires_grad:
        raise UsageError(
            "loss_fn returned a loss that does not require a gradient, though the output does, so nothing "
            "would be trained. Remove detach(), item() or no_grad from loss_fn."
        )
    return value.reshape(())
