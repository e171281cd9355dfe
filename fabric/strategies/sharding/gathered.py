"""Calls of a module that FSDP2 shards: the root group is unsharded when needed, and reset after an error.

torch unshards parameters in hooks of `module(...)`. In a method other than forward, or in a direct call of a
layer, parameters would be sharded. Here the first called layer of the root group unshards the group. Methods
that call no layer cause no communication, so ranks may differ in calling them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from fabric.core._torch import backward_pass, in_function_transform, is_fsdp
from fabric.core.errors import UsageError
from fabric.core.torch_versions import reset_iteration, unshard_again
from fabric.core.tree import flatten, map_tree
from fabric.forward import differentiable, hook_target
from fabric.strategies._torch import fsdp_state
from fabric.strategies.error_translation import translate_dtensor_error
from fabric.strategies.sharding._torch import (
    finish_backward,
    fsdp_groups,
    fsdp_states,
    in_forward,
    is_prefetched,
    keep_unsharded,
    phase,
    register_pre_backward,
    register_pre_backward_in_place,
    reshard_root,
    unshard_root,
    unsharded_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabric.strategies.sharding.forward_check import ForwardCheck


class FSDPCallGuard:
    """Invariants at the start and at the end of each call of one model.

    Invariant: outside of calls and backwards `model.parameters()` are the shards, which the optimizer has,
    also if torch keeps a group unsharded from forward to backward. So operations of the user between calls
    (`zero_grad`, `p.grad = None`, an average of weights) act on the shards. And unsharded weights are always
    gathered in the call that uses them, never before a step.

    Args:
        root: The outermost module that `fully_shard` was called on.
        checks: The check of its calls.
    """

    def __init__(self, root: Any, checks: ForwardCheck) -> None:
        self.root, self.checks = root, checks
        # Cached: torch looks it up in a dictionary of all modules, which torch.compile would guard.
        self.state = fsdp_state(root)
        self.running = self._in_backward = False
        self.method = ""
        """Name of the method that runs, or of the outermost one that runs; "" in a forward."""
        self.opener: Any = None
        self.first_calls: Any = None
        """Compares parameters before and after the first calls: `RootCalls`."""
        self._unsharded_for_backward = self._reached = False
        self._hidden: dict[Any, None] = {}
        """States of modules whose forward returns no tensor that torch finds, in the order of their calls."""
        states = dict.fromkeys(fsdp_states(root))
        self.shards = _shards(fsdp_groups([*states]), root)
        """{group: its parameters outside of calls, as (module, name, parameter); of a tied one several}."""
        owners = [module for group in fsdp_groups([self.state]) for module, _, _ in self.shards[group]]
        for layer in dict.fromkeys(owners):
            if layer is not root:
                layer.register_forward_pre_hook(self._before, prepend=True)
                layer.register_forward_hook(self._after, always_call=True)
        for name, module in root.named_modules():
            if is_fsdp(module) and (state := fsdp_state(module)) in states:
                register_pre_backward_in_place(state, partial(self._register_pre_backward, state, module))
                module.register_forward_pre_hook(partial(self._enter, state, name), prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    def begin(self) -> None:
        """Begin an outermost call of this model: reset groups that are still unsharded.

        Raises:
            UsageError: Parameters were replaced, for example by `torch.func.functional_call`.
        """
        if backward_pass() != -1:  # a recomputation in backward
            self.restore_unsharded()
            return
        if in_forward(self.state):
            self.recover()  # after an error in a submodule that was called directly
        idle, self._in_backward = True, False
        for group, shards in self.shards.items():
            idle = idle and group.is_sharded and not is_prefetched(group)
            for module, name, shard in shards:
                if module._parameters.get(name) is not shard:
                    raise _replaced_error(module, name)
        if not idle:
            self._reset()
        self._unsharded_for_backward = False

    def end(self) -> None:
        """End a call: put the shards back on the modules. Unsharded copies for backward stay allocated."""
        if backward_pass() != -1:
            return
        for_backward, hidden = torch.is_grad_enabled(), fsdp_groups([*self._hidden])
        for group in self.shards:
            if group.is_sharded:
                continue
            if for_backward or group in hidden:
                self._restore_shards(group)
                self._unsharded_for_backward = True
            else:
                group.reshard()

    def reached(self, grad: Any) -> None:
        """Run when a backward reaches an output of the model or of a submodule.

        Raises:
            UsageError: The backward has create_graph=True: a second one would use freed memory.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                f"create_graph=True went through {_name(self.root)}, which is sharded. Its parameters are "
                "freed after the backward, so a second backward through the gradients (a gradient penalty) "
                'would use other values. Use strategy="ddp" or "zero1" for this model.'
            )
        if not self._in_backward:
            self._in_backward = True
            self.checks.record("backward")
        self._reached = True
        self.restore_unsharded()

    def reduce_hidden(self) -> bool:
        """Reduce the gradients that are still unsharded at the end of a backward. All ranks must call this.

        Returns:
            Whether the backward reached the model.

        Raises:
            UsageError: As `reached`.
        """
        wholes = self._wholes()
        for shard, whole in wholes:
            if not shard.requires_grad:  # frozen since the forward
                whole.grad = None
        left = [whole.grad for _, whole in wholes if whole.grad is not None]
        if any([grad.requires_grad for grad in left]):
            self.reached(left[0])
        if left:
            self.reduce_rest()
            finish_backward(self.state)
        for group in fsdp_groups([*self._hidden]):
            self._restore_shards(group)
        reached, self._reached = self._reached or bool(left), False
        return reached

    def restore_unsharded(self) -> None:
        """Put unsharded parameters on the modules again, for layers that are recomputed in backward."""
        if self._unsharded_for_backward:
            self._unsharded_for_backward = False
            for group in self.shards:
                if group.is_unsharded:
                    for part in group.fsdp_params:
                        part.to_unsharded()  # also copies requires_grad of the shard

    def open(self, opener: Any) -> None:
        """Unshard the root group; `opener` must call `close`."""
        self.opener = opener
        if self.checks.check_forward():
            self.allocate_outside_inference()
        unshard_root(self.state, self.root)
        if self.first_calls is not None:
            self.first_calls.begin(self.method if opener is self else opener)

    def close(self, out: Any) -> Any:
        """Reshard the root group as after a forward; return `out`, whose backward unshards it again."""
        opener, self.opener = self.opener, None
        if self.first_calls is not None:
            self.first_calls.end(f"The method {self.method}" if opener is self else "The forward")
        return reshard_root(self.state, self.root, out)

    def recover(self) -> None:
        """Reset after a failed forward or backward: reshard groups, and discard partial gradients."""
        self.opener = None
        self._unsharded_for_backward = self._reached = False
        self._reset()
        for _, whole in self._wholes():
            whole.grad = None

    def reduce_rest(self) -> None:
        """After a nested backward: reduce again the gradients of groups that were reduced before.

        If such a group is recomputed for another forward, torch assumes that its hooks already ran. Its
        gradients would stay unreduced and outside of `.grad`.
        """
        for group in self.shards:
            if phase(group) == "POST_BACKWARD" and group.is_unsharded:
                group.post_backward()

    def _reset(self) -> None:
        """Reshard all groups; keep `.grad` of earlier backwards, which torch 2.15 would drop."""
        parts = [part for group in self.shards for part in group.fsdp_params]
        grads = [part.sharded_param.grad for part in parts]
        reset_iteration(self.root)
        for part, grad in zip(parts, grads, strict=True):
            part.sharded_param.grad = grad

    def _wholes(self) -> list[tuple[Any, Any]]:
        """Return (shard, gathered parameter) of the parameters that were gathered once."""
        parts = [part for group in self.shards for part in group.fsdp_params]
        return [(p.sharded_param, whole) for p in parts if (whole := unsharded_of(p)) is not None]

    def _restore_shards(self, group: Any) -> None:
        """Put the shards of a group back on its modules. The gathered parameters stay allocated."""
        for module, name, shard in self.shards[group]:
            if type(module).__setattr__ is Module.__setattr__:
                module._parameters[name] = shard  # 10 times faster
            else:
                setattr(module, name, shard)

    def allocate_outside_inference(self) -> None:
        """Allocate the memory of the first all-gather outside of inference_mode.

        Memory that torch allocates under inference_mode can be used only there.
        """
        if not torch.is_inference_mode_enabled():
            return
        with torch.inference_mode(False), torch.no_grad():
            for group in self.shards:
                if any([unsharded_of(part) is None for part in group.fsdp_params]):
                    group.unshard()
                    group.wait_for_unshard()
                    group.reshard()

    def _before(self, layer: Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.opener is not None:
            return
        if phase(self.state) == "IDLE":
            if not self.running:
                self.begin()
            self.open(self if self.method else layer)

    def _after(self, layer: Module, args: Any, out: Any) -> Any:
        if self.opener is not layer:
            return out
        out = self.close(out)
        if not self.running:
            self.end()
        return out

    def _enter(self, state: Any, name: str, module: Module, args: Any) -> None:
        """Run before a call of a group, which torch treats as part of a backward in PRE_BACKWARD."""
        if torch.compiler.is_compiling():
            return
        if phase(state) == "PRE_BACKWARD":
            unshard_again(state)
            return
        if not (self.running or in_forward(self.state)):
            self.begin()
        if torch.is_grad_enabled() and backward_pass() == -1:
            self.checks.record(name)
        if self.checks.enter(module, name):
            self.allocate_outside_inference()

    def _leave(self, module: Module, args: Any, out: Any) -> None:
        self.checks.leave(module)
        if not (self.running or torch.compiler.is_compiling() or in_forward(self.state)):
            self.end()

    def _register_pre_backward(self, state: Any, module: Any, out: Any) -> Any:
        """Register the pre-backward hooks on the base tensors of outputs; replaces torch's registration.

        Outputs of `nn.Linear` in three dimensions are views, and `out += x` silently drops a view's hooks.
        """
        if not torch.is_grad_enabled():
            return out
        if in_function_transform():
            return register_pre_backward(state, out)
        if any([_is_view_of_input(leaf) for leaf in differentiable(out)]):
            out = map_tree(lambda leaf: leaf.clone() if _is_view_of_input(leaf) else leaf, out)
        leaves = [hook_target(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(out)[0]]
        register_pre_backward(state, leaves)
        hooked = differentiable(leaves)
        parts = [part for group in fsdp_groups([] if hooked else [state]) for part in group.fsdp_params]
        if state not in self._hidden and any([part.sharded_param.requires_grad for part in parts]):
            # No hook would unshard it for its backward, so it stays unsharded until the next call.
            self._hidden[state] = None
            keep_unsharded(module)
            module.unshard()
        for leaf in hooked:
            if leaf.grad_fn is not None:  # hooks of a parameter that is an output would never be removed
                leaf.register_hook(self.reached)
        return out


class GatheredCall:
    """A forward or method of a sharded module; after an error in it all groups are reset.

    Args:
        call: The module's `__call__`, or a bound method of it.
        gate: The call guard of the model.
        method: Whether it is a method: its first layer of the root group unshards it for the whole call.
        unshard_first: Whether the root group is unsharded first, since the call may read parameters.
    """

    __slots__ = ("call", "gate", "method", "unshard_first")

    def __init__(
        self, call: Callable[..., Any], gate: FSDPCallGuard, method: bool, unshard_first: bool = False
    ) -> None:
        self.call = call
        self.gate = gate
        self.method = method
        self.unshard_first = unshard_first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call.

        Raises:
            UsageError: A method used a sharded parameter directly.
            CollectiveMismatch: Gradients are disabled, and other ranks made another call.
        """
        gate, outer, nested = self.gate, not self.gate.running, self.gate.method
        compiling = torch.compiler.is_compiling()
        try:
            if outer and not compiling:
                gate.begin()
                if not self.method and gate.checks.enter(self):  # here, since compiled modules run no hooks
                    gate.allocate_outside_inference()
            name = getattr(self.call, "__name__", type(self.call).__name__) if self.method else ""
            gate.running, gate.method = True, nested or name
            if self.unshard_first and outer and gate.opener is None:
                gate.open(gate)
            out = self.call(*args, **kwargs)
            if gate.opener is gate and outer:
                out = gate.close(out)
        except BaseException as error:
            # Before groups are reset: the translation reads their state.
            better = translate_dtensor_error(
                error, self.call, gate.root, self.method, marked=self.unshard_first
            )
            gate.recover()
            if outer and not compiling:
                gate.checks.abort(self, error)
            if better is not None:
                raise better from error
            raise
        finally:
            gate.running, gate.method = not outer, nested
            if not compiling:
                gate.checks.leave(self)
        if outer and not compiling:
            gate.end()
            if not self.method:
                gate.checks.finish()
        return out

    def __getattr__(self, name: str) -> Any:
        if name in GatheredCall.__slots__:  # not set yet during a copy
            raise AttributeError(name)
        return getattr(self.call, name)


def _replaced_error(module: Any, name: str) -> UsageError:
    return UsageError(
        f"{name} of {type(module).__name__} was replaced after fabric.setup. A sharded model "
        "does not support torch.func.functional_call or other replacements of parameters. Use "
        'strategy="ddp".'
    )


def _is_view_of_input(leaf: Any) -> bool:
    """Whether it is a view of an input, which torch forbids to change in place under FSDP2."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and hook_target(leaf)._base is not None


def _name(root: Any) -> str:
    return type(root).__name__.removeprefix("FSDP")


def _shards(groups: list[Any], root: Any) -> dict[Any, list[tuple[Module, str, Any]]]:
    of = {part.sharded_param: group for group in groups for part in group.fsdp_params}
    found: dict[Any, list[tuple[Module, str, Any]]] = {group: [] for group in groups}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter in of:
                found[of[parameter]].append((module, name, parameter))
    return found
