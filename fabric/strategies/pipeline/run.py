"""`Runner`: one rank's way through the micro-batches of a pass. All ranks of the pipeline run it together.

Every forward and every backward sends one message on, whatever happens: a stage that has failed sends word of
it in place of tensors, and takes what comes. So nobody waits for ever, nothing is left on the way, and at the
end of a pass all ranks know.
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
from fabric.strategies.pipeline.link import Failed, Link
from fabric.strategies.pipeline.stage import own
from fabric.utilities.random_stream import RandomStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fabric.collectives.channel import Channel
    from fabric.strategies.data_parallel.parts import Call
    from fabric.strategies.pipeline.stage import Stage


Lanes = tuple[Any, Any]
Order = list[tuple[Literal["F", "B"], int]]
"""("F", 2): forward of micro-batch 2."""


def forwards(count: int) -> Order:
    """All forwards."""
    return [("F", index) for index in range(count)]


def backwards(count: int) -> Order:
    """All backwards, the last micro-batch first: its activations are the youngest."""
    return [("B", index) for index in reversed(range(count))]


def alternating(stage: int, stages: int, count: int) -> Order:
    """A backward as soon as there can be one: a stage holds those of at most `stages - stage` at once."""
    ahead = min(stages - stage - 1, count)
    order = forwards(ahead)
    for index in range(count - ahead):
        order += [("F", ahead + index), ("B", index)]
    return order + [("B", index) for index in range(count - ahead, count)]


class Kept(NamedTuple):
    """Tensors of one forward of one micro-batch, kept until its backward."""

    inputs: list[Any]
    """Leaves that were received (or are the user's), in order."""
    outputs: list[Any]
    """Where in the graph the leaves that were sent on come from; None: they need no gradient."""


class Runner:
    """One stage and its links to the others.

    Args:
        stage: This rank's blocks.
        ranks: Global ranks of the pipeline, by stage.
        channel: Of these ranks.
        lanes: Their process groups for activations and for gradients. Where tensors wait in the order of
            their calls (NCCL), two of them: two ranks may then send to each other at once.
    """

    def __init__(self, stage: Stage, ranks: list[int], channel: Channel, lanes: Lanes) -> None:
        self.stage, self.ranks, self.channel = stage, ranks, channel
        self._around: int | None = None
        self.random = RandomStream(stage.index if len(ranks) > 1 else None, channel.transport.device)
        here, transport = stage.index, channel.transport

        def link(to: int, lane: int) -> Link | None:
            return Link(ranks[to], lanes[lane], transport, lane) if 0 <= to < len(ranks) else None

        self._arriving = {"F": link(here - 1, 0), "B": link(here + 1, 1)}
        self._leaving = {"F": link(here + 1, 0), "B": link(here - 1, 1)}

    def run(self, order: Order, work: Pass) -> None:
        """One pass. Afterwards, and not before, ask `finish`."""
        self._around = backward_pass()
        left = Counter([kind for kind, _ in order])
        for kind, index in order:
            left[kind] -= 1
            self._pass_on(kind, index, work, more=left[kind] > 0)
        self._around = None

    def passing(self) -> bool:
        """Whether autograd is in a backward of this stage's blocks, and not in the user's around it."""
        return self._around is not None and backward_pass() != self._around

    def report(self, work: Pass, place: int, tree: Any) -> Any:
        """The tree that the stage at `place` has, on all ranks; on failure a `Failed`."""
        here = self.stage.index == place
        sent = (work.failed or map_tree(_leaf_like, tree), self.random.drawn) if here else None
        told, drawn = broadcast_tree(sent, self.ranks[place], self.channel)
        self.random.drawn |= drawn
        if isinstance(told, Failed):
            work.failed = work.failed or told
        return told if work.failed or not here else tree

    def finish(self, work: Pass, doing: str) -> None:
        """After the last report: everything that was sent has been taken. Raises what went wrong.

        Raises:
            RankError: Another stage has failed. On the rank itself: what it has failed with.
        """
        for link in self._leaving.values():
            if link is not None:
                link.flush()
        if work.error is not None:
            raise work.error
        if work.failed is not None:
            error = RankError(f"{doing} failed on rank {work.failed.rank}: {work.failed.text}")
            error.fabric_raised_by = work.failed.rank  # type: ignore[attr-defined]
            raise error

    def note(self, error: Exception, work: Pass, doing: str) -> None:
        """This stage has failed: it raises at the end of the pass, and the others hear of it."""
        where = f"{describe(error)}, in {self.stage.name}, {doing}"
        work.error, work.failed = error, Failed(self.ranks[self.stage.index], where)

    def _pass_on(self, kind: str, index: int, work: Pass, more: bool) -> None:
        """Take a message, if another stage is before, and send one, if another is after, whatever happens."""
        arriving, leaving = self._arriving[kind], self._leaving[kind]
        given = None
        if arriving is not None:
            given = arriving.take()
            self.random.drawn |= arriving.flag
            if more:
                arriving.expect()
        if isinstance(given, Failed):
            work.failed = work.failed or given
        message = None
        if work.failed is None:
            try:
                found = (self._compute if kind == "F" else self._differentiate)(index, given, work)
                if leaving is not None:
                    message = leaving.message(found)
            except Exception as error:
                doing = "forward" if kind == "F" else "backward"
                self.note(error, work, f"{doing} of micro-batch {index + 1} of {len(work.calls)}")
        if leaving is not None:
            sent: Any = message or work.failed
            leaving.send(sent, self.random.drawn)

    def _compute(self, index: int, arrived: Any, work: Pass) -> Any:
        call = work.calls[index] if self.stage.is_first else ((arrived,), {})
        grad = torch.is_grad_enabled()
        args, kwargs = own(call) if grad else call
        # Which one goes back right after: with a loss, each one of the last stage.
        alone = work.loss is None or len(work.calls) == 1
        at_once = index == len(work.calls) - 1 if alone else self.stage.is_last
        out = self.stage.forward(args, kwargs, at_once)
        if work.loss is not None and self.stage.is_last:
            out = work.loss(index, out)
            work.grads[index] = [torch.ones_like(out)]
        if grad:
            # Not the tensors themselves: what has been sent on is not needed any more.
            edges = [
                get_gradient_edge(leaf) if leaf is not None and leaf.requires_grad else None
                for leaf in flatten(out)[0]
            ]
            work.kept[index] = Kept(flatten(call)[0], edges)
        if self.stage.is_last:
            work.outputs[index] = out
        self.random.update_drawn()
        return out

    def _differentiate(self, index: int, grads: Any, work: Pass) -> list[Any]:
        if self.stage.is_last:
            grads = work.grads.pop(index)
        kept = work.kept[index] if work.retain else work.kept.pop(index)
        pairs = [
            (edge, grad)
            for edge, grad in zip(kept.outputs, grads, strict=True)
            if edge is not None and grad is not None
        ]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs], work.retain)
        found = []
        for leaf in kept.inputs:
            wanted = isinstance(leaf, torch.Tensor) and leaf.requires_grad
            found.append(leaf.grad if wanted else None)
            if wanted:
                leaf.grad = None
        if self.stage.is_first:
            work.input_grads[index] = found
        return found


class Pass:
    """Inputs and results of one pass.

    Args:
        calls: The arguments of each micro-batch. Only the first stage looks at them.
        loss: (micro-batch, output) -> loss, on the last stage; None: outputs are what is wanted.
        number: Of the forward.
    """

    def __init__(
        self, calls: list[Call], loss: Callable[[int, Any], Tensor] | None = None, number: int = 0
    ) -> None:
        self.calls, self.loss, self.number = calls, loss, number
        self.kept: dict[int, Kept] = {}
        self.outputs: dict[int, Any] = {}
        self.grads: dict[int, list[Any]] = {}
        """Of the outputs of each micro-batch, on the last stage."""
        self.input_grads: dict[int, list[Any]] = {}
        self.retain = False
        self.failed: Failed | None = None
        self.error: Exception | None = None


def _leaf_like(leaf: Tensor | None) -> Tensor | None:
    """The tensor without its graph, of which it says whether it has one."""
    return None if leaf is None else leaf.detach().requires_grad_(leaf.requires_grad)
