"""The gradients of an engine, which hold them in places of their own. What is private to DeepSpeed is here.

Seen in 0.19.8: stage 3, and offloaded optimizers, copy the first gradient of a step over what is there, by a
count of forwards. What had no gradient keeps that of a step before, and the second backward of one forward
takes the place of the first. So buffers are zeroed after each step here, and everything is added to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_ADD = 1
"""As a number of a micro-step: not the first one, which copies."""


def trains(engine: Any) -> bool:
    """Whether it has an optimizer; under stage 3 one that is only evaluated is an engine, too."""
    return hasattr(engine.optimizer, "optimizer")


def take_over(engine: Any) -> None:
    """From now on nothing begins or ends a backward but `Gradients`.

    By itself the engine does so where a graph has run that its outputs are in, of `torch.autograd.grad`, too,
    and not at all where two forwards are in one loss.
    """
    engine._running_engine_backward = True
    if not trains(engine):
        engine.optimizer.set_gradient_accumulation_boundary = bool  # which the engine calls and it lacks


def is_stepped(parameter: Any) -> bool:
    """Whether an engine has taken a parameter in: it required a gradient then, and was in the optimizer."""
    if hasattr(parameter, "_z3_optimizer"):
        optimizer = parameter._z3_optimizer
        return optimizer.get_param_id(parameter) in optimizer.grad_position
    return hasattr(parameter, "_hp_mapping")


class Gradients:
    """The gradients of an engine that trains, from one `zero_grad` to the next. All ranks make each call.

    Args:
        engine: The engine.
        held: The parameters that its optimizer was given.
    """

    def __init__(self, engine: Any, held: list[Tensor]) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        names = {p: name for name, p in engine.module.named_parameters()}
        self._held = [(names.get(p, "of the optimizer"), p, is_stepped(p)) for p in held]
        self.there = False
        """Whether a backward has made some."""
        self.means = False
        """Whether they are means over ranks, to be clipped, divided, stepped with."""
        self._taken = False
        """Whether a step has taken them: torch would still have them."""
        self._zeroed = False
        """Whether they are zeros that no backward has added to: torch would step with them."""
        self._reached = self._clean = False
        self.drop()

    def begin(self) -> None:
        """Before a backward: what it makes is added to what is there."""
        self.engine.set_gradient_accumulation_boundary(False)
        self.optimizer.clear_backward_seen_flag()  # as each forward does: there may be none in between
        self.optimizer.micro_step_id = _ADD
        self._reached = self._clean = False

    def reach(self) -> None:
        """A backward has come to the engine, perhaps for a second time through the same outputs.

        Raises:
            UsageError: The gradients are means already, and no step has taken them.
        """
        if self.means:
            raise UsageError(
                "This backward came after gradients were clipped or divided, and before the step that takes "
                "them. Clip after the last backward of a step, or call optimizer.zero_grad()."
            )
        if not self._reached:
            self._reached = True
            self.engine._backward_prologue()

    def end(self) -> bool:
        """After a backward; whether it has come to the engine, perhaps by its parameters alone.

        Raises:
            UsageError: Other parameters are trained now than at setup.
        """
        came = self._reached or self.optimizer._hooks_fired_this_backward > 0
        if not came and self.engine.zero_optimization_stage() == 1:
            came = any([p.grad is not None for _, p, _ in self._held])
        if came:
            self.there = True
            self.engine._backward_epilogue()
        self.optimizer._backward_active_depth = 0
        for name, parameter, stepped in self._held:
            if parameter.requires_grad != stepped:
                was, now = ("trained", "is frozen") if stepped else ("frozen", "requires a gradient")
                raise UsageError(
                    f"Parameter {name} was {was} at fabric.setup and {now} now, and DeepSpeed's engine steps "
                    "what it took in then. Train or freeze it all the time, in a model set up anew."
                )
        return came

    def finish(self) -> None:
        """Make them means over ranks.

        Raises:
            UsageError: They should have those of a step before added to them.
        """
        if self._taken:
            raise UsageError(
                "There was no optimizer.zero_grad() since the last optimizer.step(): DeepSpeed drops "
                "gradients in a step, torch keeps them and adds the next ones. Call optimizer.zero_grad()."
            )
        if self.means or not self.there:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self.engine.zero_optimization_stage() == 1:
            self.engine.allreduce_gradients()
        else:
            self.optimizer.finalize_gradient_accumulation_boundary()
        self.means = True

    def parts(self) -> tuple[list[Tensor], float]:
        """After `finish`: this rank's part of them, into which one may write before a step, and the loss
        scale by which they are too large.
        """
        if not self.there:
            return [], 1.0
        groups = self.optimizer.averaged_gradients.values()
        parts = self._offloaded() or [part for group in groups for part in group or ()]
        return parts, float(self.optimizer.loss_scale)

    def step(self) -> bool:
        """Let the engine step; whether there was something to step with.

        Raises:
            UsageError: torch would step with zeros.
        """
        self.finish()
        if self.there:
            self.engine.step()
            self.drop()
            self._taken = True
            return True
        if self._zeroed:
            raise UsageError(
                "optimizer.step() came after zero_grad(set_to_none=False) and no backward: torch steps with "
                "zeros there, and DeepSpeed has none. Write zero_grad(), or leave the step out."
            )
        return False

    def drop(self, set_to_none: bool = True) -> None:
        """Forget them."""
        self._zeroed = not set_to_none and (self.there or self._taken or self._zeroed)
        self.there = self.means = self._taken = False
        if self._clean:
            return
        self._clean = True
        for parameter in self.engine.module.parameters():
            parameter.grad = None  # of a backward that failed
        self.optimizer.zero_grad()
        for part in self._offloaded():
            part.zero_()
        if self.engine.zero_optimization_stage() == 3:
            self.optimizer.grad_partitions_flat_buffer.zero_()
            return
        for table in (self.optimizer.averaged_gradients, self.optimizer.all_grad_tensors):
            table.update(dict.fromkeys(table))
        for part in getattr(self.optimizer, "accumulated_grads_in_cpu", {}).values():
            part.zero_()

    def _offloaded(self) -> list[Tensor]:
        """Gradients that lie with the masters, where these are offloaded."""
        optimizer = self.optimizer
        if not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)):
            return []
        name = "fp32_partitioned_groups_flat"
        masters = getattr(optimizer, name, None) or optimizer.single_partition_of_fp32_groups
        return [master.grad for master in masters if master.grad is not None]
