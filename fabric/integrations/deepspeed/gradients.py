"""The gradients of an engine, in DeepSpeed's own buffers. This file has DeepSpeed's private names.

Seen in 0.19.8: stage 3, and offloaded optimizers, overwrite the buffer with the first gradient of a
step, by a count of forwards. A parameter without a gradient keeps that of the previous step, and the second
backward of one forward overwrites the first. Therefore this file zeroes buffers after each step, and every
backward adds to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fabric.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_ADD = 1
"""A number of a micro-step that is not the first one, so that DeepSpeed adds gradients."""


def has_optimizer(engine: Any) -> bool:
    """Whether an engine has an optimizer; under stage 3 models for evaluation are engines, too."""
    return hasattr(engine.optimizer, "optimizer")


def disable_backward_hooks(engine: Any) -> None:
    """Turn the engine's own handling of backward off; `Gradients` begins and ends each backward.

    The engine also handles `torch.autograd.grad` of its outputs, and misses a loss of two forwards.
    """
    engine._running_engine_backward = True
    if not has_optimizer(engine):
        engine.optimizer.set_gradient_accumulation_boundary = bool  # the engine calls this missing method


def is_stepped(parameter: Any) -> bool:
    """Whether an engine steps a parameter: at setup it required a gradient and was in the optimizer."""
    if hasattr(parameter, "_z3_optimizer"):
        optimizer = parameter._z3_optimizer
        return optimizer.get_param_id(parameter) in optimizer.grad_position
    return hasattr(parameter, "_hp_mapping")


class Gradients:
    """Gradients of an engine with an optimizer, from one `zero_grad` to the next. All ranks make each call.

    Args:
        engine: The engine.
        parameters: The parameters of its optimizer.
    """

    def __init__(self, engine: Any, parameters: list[Tensor]) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        names = {p: name for name, p in engine.module.named_parameters()}
        self._parameters = [(names.get(p, "of the optimizer"), p, is_stepped(p)) for p in parameters]
        self.exist = False
        """Whether a backward has computed gradients."""
        self.averaged = False
        """Whether they are averaged over ranks, as clipping, division and steps require."""
        self._stepped = False
        """Whether a step has used and dropped them: torch would keep them."""
        self._zeroed = False
        """Whether `zero_grad` set them to zero and no backward followed: torch would step with zeros."""
        self._reached = self._clean = False
        self.drop()

    def begin(self) -> None:
        """Prepare a backward, whose gradients are added to the existing ones."""
        self.engine.set_gradient_accumulation_boundary(False)
        self.optimizer.clear_backward_seen_flag()  # each forward does so, but there may be none in between
        self.optimizer.micro_step_id = _ADD
        self._reached = self._clean = False

    def reach(self) -> None:
        """Handle a backward that reached an output of the engine, maybe for the second time.

        Raises:
            UsageError: The gradients are averaged already, and no step has used them.
        """
        if self.averaged:
            raise UsageError(
                "This backward came after gradients were clipped or divided, and before the step that uses "
                "them. Clip after the last backward of a step, or call optimizer.zero_grad()."
            )
        if not self._reached:
            self._reached = True
            self.engine._backward_prologue()

    def end(self) -> bool:
        """Complete a backward; return whether it reached the engine, maybe through parameters only.

        Raises:
            UsageError: Other parameters require gradients than at setup.
        """
        reached = self._reached or self.optimizer._hooks_fired_this_backward > 0
        if not reached and self.engine.zero_optimization_stage() == 1:
            reached = any([p.grad is not None for _, p, _ in self._parameters])
        if reached:
            self.exist = True
            self.engine._backward_epilogue()
        self.optimizer._backward_active_depth = 0
        for name, parameter, stepped in self._parameters:
            if parameter.requires_grad != stepped:
                was, now = ("trained", "is frozen") if stepped else ("frozen", "requires a gradient")
                raise UsageError(
                    f"Parameter {name} was {was} at fabric.setup and {now} now, and DeepSpeed's engine steps "
                    "what it took in then. Train or freeze it all the time, in a model set up anew."
                )
        return reached

    def finish(self) -> None:
        """Average the gradients over ranks.

        Raises:
            UsageError: There was no `zero_grad` since the last step, whose gradients torch would add.
        """
        if self._stepped:
            raise UsageError(
                "There was no optimizer.zero_grad() since the last optimizer.step(): DeepSpeed drops "
                "gradients in a step, torch keeps them and adds the next ones. Call optimizer.zero_grad()."
            )
        if self.averaged or not self.exist:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        if self.engine.zero_optimization_stage() == 1:
            self.engine.allreduce_gradients()
        else:
            self.optimizer.finalize_gradient_accumulation_boundary()
        self.averaged = True

    def parts(self) -> tuple[list[Tensor], float]:
        """Return this rank's gradient shards, writable until the step, and the loss scale that they are
        multiplied by. Call `finish` first.
        """
        if not self.exist:
            return [], 1.0
        groups = self.optimizer.averaged_gradients.values()
        parts = self._offloaded() or [part for group in groups for part in group or ()]
        return parts, float(self.optimizer.loss_scale)

    def step(self) -> bool:
        """Step the engine; return whether there were gradients.

        Raises:
            UsageError: torch would step with zeros.
        """
        self.finish()
        if self.exist:
            self.engine.step()
            self.drop()
            self._stepped = True
            return True
        if self._zeroed:
            raise UsageError(
                "optimizer.step() came after zero_grad(set_to_none=False) and no backward: torch steps with "
                "zeros there, and DeepSpeed has none. Write zero_grad(), or leave the step out."
            )
        return False

    def drop(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self._zeroed = not set_to_none and (self.exist or self._stepped or self._zeroed)
        self.exist = self.averaged = self._stepped = False
        if self._clean:
            return
        self._clean = True
        for parameter in self.engine.module.parameters():
            parameter.grad = None  # left by a failed backward
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
        """Return the gradients of offloaded master weights."""
        optimizer = self.optimizer
        if not (getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)):
            return []
        name = "fp32_partitioned_groups_flat"
        masters = getattr(optimizer, name, None) or optimizer.single_partition_of_fp32_groups
        return [master.grad for master in masters if master.grad is not None]
