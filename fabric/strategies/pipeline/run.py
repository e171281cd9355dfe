"""`Runner`: the schedule of one rank: forward and backward of each micro-batch. All ranks of the pipeline
run theirs at the same time.

Every forward and every backward receives and sends one message, also after an error: a stage that failed
sends a `StageFailure` in place of tensors. So no rank waits forever, no message is left unreceived, and all
ranks raise at the end of the pass.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from fabric.collectives.objects import broadcast_tree
from fabric.core._torch import backward_pass
from fabric.core.errors import RankError
from fabric.core.tree import flatten, map_tree
from fabric.launch.rank_exit import describe
from fabric.strategies.pipeline.link import Link, StageFailure
from fabric.strategies.pipeline.stage import as_non_leaves
from fabric.utilities.random_stream import RandomStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.strategies.data_parallel.parts import Call
    from fabric.strategies.pipeline.stage import Stage


P2PGroups = tuple[Any, Any]
Schedule = list[tuple[Literal["F", "B"], int]]
"""Actions in order; ("F", 2) is the forward of micro-batch 2, "B" is a backward."""


def all_forwards(count: int) -> Schedule:
    """Return the schedule of all forwards."""
    return [("F", index) for index in range(count)]


def all_backwards(count: int) -> Schedule:
    """Return the schedule of all backwards, the last micro-batch first."""
    return [("B", index) for index in reversed(range(count))]


def one_forward_one_backward(stage: int, stages: int, count: int) -> Schedule:
    """Return the 1F1B schedule: a stage holds activations of at most `stages - stage` micro-batches."""
    warmup = min(stages - stage - 1, count)
    schedule = all_forwards(warmup)
    for index in range(count - warmup):
        schedule += [("F", warmup + index), ("B", index)]
    return schedule + [("B", index) for index in range(count - warmup, count)]


class SavedForward(NamedTuple):
    """Values of the forward of one micro-batch that its backward needs."""

    inputs: list[Any]
    """Leaves that the stage received (or that the user passed), in order."""
    outputs: list[Any]
    """Gradient edges of the leaves that the stage returned; None: a leaf needs no gradient."""


class Runner:
    """One stage and its links to the neighbouring stages.

    Args:
        stage: This rank's blocks.
        ranks: Global ranks of the pipeline, in the order of stages.
        channel: The channel of these ranks.
        p2p_groups: Their process groups for activations and for gradients. NCCL runs the calls of a group in
            order, so there are two groups: two ranks may then send to each other at the same time.
    """

    def __init__(self, stage: Stage, ranks: list[int], channel: Channel, p2p_groups: P2PGroups) -> None:
        self.stage, self.ranks, self.channel = stage, ranks, channel
        self._outer_pass: int | None = None
        self.random = RandomStream(stage.index if len(ranks) > 1 else None, channel.transport.device)
        before, after, transport = stage.index - 1, stage.index + 1, channel.transport

        def link(to: int, tag: int) -> Link | None:
            return Link(ranks[to], p2p_groups[tag], transport, tag) if 0 <= to < len(ranks) else None

        self._inbound = {"F": link(before, 0), "B": link(after, 1)}
        self._outbound = {"F": link(after, 0), "B": link(before, 1)}

    def run(self, schedule: Schedule, state: PassState) -> None:
        """Run the actions of `schedule`. Errors are recorded in `state`, and raised by `finish`."""
        self._outer_pass = backward_pass()
        remaining = Counter([kind for kind, _ in schedule])
        for kind, index in schedule:
            remaining[kind] -= 1
            self._run_action(kind, index, state, more=remaining[kind] > 0)
        self._outer_pass = None

    def in_stage_backward(self) -> bool:
        """Whether the running backward pass is one of this stage's blocks, not the user's around it."""
        return self._outer_pass is not None and backward_pass() != self._outer_pass

    def broadcast_result(self, state: PassState, src_stage: int, tree: Any) -> Any:
        """Return the tree of stage `src_stage` on all ranks; on failure a `StageFailure`."""
        is_src = self.stage.index == src_stage
        sent = (state.failed or map_tree(_detached, tree), self.random.drawn) if is_src else None
        received, drawn = broadcast_tree(sent, self.ranks[src_stage], self.channel)
        self.random.drawn |= drawn
        if isinstance(received, StageFailure):
            state.failed = state.failed or received
        return received if state.failed or not is_src else tree

    def finish(self, state: PassState, doing: str) -> None:
        """Complete all sends after the last `broadcast_result`, and raise the error of the pass.

        Raises:
            RankError: Another stage failed. The rank that failed raises its own error.
        """
        for link in self._outbound.values():
            if link is not None:
                link.flush()
        if state.error is not None:
            raise state.error
        if state.failed is not None:
            error = RankError(f"{doing} failed on rank {state.failed.rank}: {state.failed.text}")
            error.fabric_raised_by = state.failed.rank  # type: ignore[attr-defined]
            raise error

    def record_failure(self, error: Exception, state: PassState, doing: str) -> None:
        """Record that this stage failed. All ranks raise at the end of the pass."""
        where = f"{describe(error)}, in {self.stage.name}, {doing}"
        state.error, state.failed = error, StageFailure(self.ranks[self.stage.index], where)

    def _run_action(self, kind: str, index: int, state: PassState, more: bool) -> None:
        """Receive, compute and send one micro-batch. Receives and sends also after an error."""
        inbound, outbound = self._inbound[kind], self._outbound[kind]
        received = None
        if inbound is not None:
            received = inbound.recv()
            self.random.drawn |= inbound.flag
            if more:
                inbound.post_recv()
        if isinstance(received, StageFailure):
            state.failed = state.failed or received
        message = None
        if state.failed is None:
            try:
                run = self._forward_microbatch if kind == "F" else self._backward_microbatch
                result = run(index, received, state)
                if outbound is not None:
                    message = outbound.message(result)
            except Exception as error:
                doing = "forward" if kind == "F" else "backward"
                self.record_failure(error, state, f"{doing} of micro-batch {index + 1} of {len(state.calls)}")
        if outbound is not None:
            sent: Any = message or state.failed
            outbound.send(sent, self.random.drawn)

    def _forward_microbatch(self, index: int, received: Any, state: PassState) -> Any:
        call = state.calls[index] if self.stage.is_first else ((received,), {})
        grad = torch.is_grad_enabled()
        args, kwargs = as_non_leaves(call) if grad else call
        # 1F1B (with a loss): on the last stage each forward; else the forward of the last micro-batch.
        forwards_first = state.loss is None or len(state.calls) == 1
        backward_follows = index == len(state.calls) - 1 if forwards_first else self.stage.is_last
        out = self.stage.forward(args, kwargs, backward_follows)
        if state.loss is not None and self.stage.is_last:
            out = state.loss(index, out)
            state.grads[index] = [torch.ones_like(out)]
        if grad:
            # Edges, not tensors: the values are not needed any more, and their memory can be freed.
            edges = [
                get_gradient_edge(leaf) if leaf is not None and leaf.requires_grad else None
                for leaf in flatten(out)[0]
            ]
            state.saved[index] = SavedForward(flatten(call)[0], edges)
        if self.stage.is_last:
            state.outputs[index] = out
        self.random.update_drawn()
        return out

    def _backward_microbatch(self, index: int, grads: Any, state: PassState) -> list[Any]:
        if self.stage.is_last:
            grads = state.grads.pop(index)
        saved = state.saved[index] if state.retain else state.saved.pop(index)
        pairs = [
            (edge, grad)
            for edge, grad in zip(saved.outputs, grads, strict=True)
            if edge is not None and grad is not None
        ]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs], state.retain)
        input_grads = []
        for leaf in saved.inputs:
            needs_grad = isinstance(leaf, torch.Tensor) and leaf.requires_grad
            input_grads.append(leaf.grad if needs_grad else None)
            if needs_grad:
                leaf.grad = None
        if self.stage.is_first:
            state.input_grads[index] = input_grads
        return input_grads


class PassState:
    """Inputs and results of one forward, with its backward, or of one `pipeline_step`.

    Args:
        calls: The arguments of each micro-batch; only the first stage uses them.
        loss: (index of the micro-batch, output) -> loss, on the last stage; None: a forward alone.
        number: Number of the forward, for the call check.
    """

    def __init__(
        self, calls: list[Call], loss: Callable[[int, Any], Tensor] | None = None, number: int = 0
    ) -> None:
        self.calls, self.loss, self.number = calls, loss, number
        self.saved: dict[int, SavedForward] = {}
        self.outputs: dict[int, Any] = {}
        self.grads: dict[int, list[Any]] = {}
        """Gradients of the outputs of each micro-batch, on the last stage."""
        self.input_grads: dict[int, list[Any]] = {}
        self.retain = False
        self.failed: StageFailure | None = None
        self.error: Exception | None = None


def _detached(leaf: Tensor | None) -> Tensor | None:
    """Return the tensor without its graph, with the same `requires_grad`."""
    return None if leaf is None else leaf.detach().requires_grad_(leaf.requires_grad)
