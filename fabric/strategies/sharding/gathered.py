"""Calls of a module that FSDP2 splits: its root group is there when needed, and usable after a failure.

torch gathers parameters in hooks of `module(...)`. A method other than forward, or a layer called by itself,
would find them split; here the first layer of the root group that is called gathers the group. A method that
computes nothing sends nothing, so that ranks may differ in calling it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from fabric.collectives.frames import ALONE
from fabric.core._torch import backward_pass
from fabric.core.compile import eager
from fabric.core.errors import UsageError
from fabric.core.torch_versions import gather_again, reset_iteration
from fabric.core.tree import flatten, map_tree
from fabric.forward import anchor, differentiable
from fabric.strategies._torch import fsdp_state
from fabric.strategies.error_translation import translate_dtensor_error
from fabric.strategies.sharding._torch import (
    finish_backward,
    free_root,
    fsdp_groups,
    fsdp_states,
    gather_root,
    in_forward,
    in_function_transform,
    is_gathered_ahead,
    modules_of,
    owner_of,
    phase,
    register_pre_backward,
    register_pre_backward_in_place,
    show_part,
    stay_gathered,
    whole_of,
)
from fabric.utilities.init import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module


class ForwardCheck:
    """Calls of one model without gradients: nothing else would tell a rank that it is alone in one.

    Calls with gradients are compared in a step. Two models of other sizes, called in another order, may not
    come so far (gloo ends the process): of them the 1st, 2nd, 4th, 8th, ... meet, too.

    Args:
        root: The model.
        layout: Its layout, which all ranks have.
        in_lockstep: Whether ranks compute parts of one call, so that another mode is another call.
    """

    def __init__(self, root: Module, layout: Any, in_lockstep: bool = False) -> None:
        self._root, self._layout, self._in_lockstep = root, layout, in_lockstep
        self._within: Any = None
        self._calls = 0
        """How many had gradients."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCheck:
        return self

    def watch(self, parts: list[Module]) -> None:
        """Compare calls of these modules between ranks, those that a method makes by itself, too."""
        names = {module: name for name, module in self._root.named_modules()}
        for part in parts:
            part.register_forward_pre_hook(partial(self._enter, names[part]))
            part.register_forward_hook(self._leave, always_call=True)

    @eager
    def check_forward(self, name: str = "") -> bool:
        """Compare before a call of the part of this name, unless a call around it was compared."""
        if self._within is not None:
            return False
        trains, mesh = torch.is_grad_enabled(), self._layout.mesh
        if trains:
            self._calls += 1
            gathers = self._in_lockstep or (mesh is not None and mesh.size(-1) == mesh.size())  # of all ranks
            first = self._calls == 1 and mesh is not None  # rows of a mesh may differ in later ones
            if self._calls & (self._calls - 1) or not (gathers or first) or backward_pass() != -1:
                return True
        if self._layout.channel is not None:
            mode = ("in training" if self._root.training else "in evaluation") if self._in_lockstep else ""
            if not trains:
                # Else a rank that calls the model once more would gather parts of before and after a change.
                changes = sum([0 if p.is_inference() else p._version for p in self._root.parameters()])
                mode += f"{', ' * bool(mode)}weights after {changes} changes in place"
            verb = f"{'forward' if trains else ALONE} of {name_of(self._root)}{', its ' * bool(name)}{name}"
            self._layout.channel.check_barrier(verb, mode)
        return True

    def note(self, what: str) -> None:
        """Take into what a step compares that this rank does this with the model."""
        self._layout.passed = crc32(f"{name_of(self._root)} {what}".encode(), self._layout.passed)

    def enter(self, call: Any, name: str = "") -> bool:
        """A call begins: as `check_forward`, for all inside of it."""
        outermost = self.check_forward(name)
        if outermost:
            self._within = call
        return outermost

    def leave(self, call: Any) -> None:
        """It has ended."""
        if self._within is call:
            self._within = None

    def _enter(self, name: str, module: Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.enter(module, name)

    def _leave(self, module: Module, args: Any, out: Any) -> None:
        if not torch.compiler.is_compiling():
            self.leave(module)


class FSDPCallGuard:
    """Invariants at the start and at the end of each call of one model.

    Invariant: outside of its calls and backwards a model's parameters are the parts, which its optimizer has,
    even where torch keeps a group gathered from a forward to its backward. So whatever a user does to them in
    between (`zero_grad`, `p.grad = None`, an average of weights) is done to the ones that count; and weights
    that are gathered were read in the call that uses them, never before a step.

    Args:
        root: The outermost module that `fully_shard` was called on.
        checks: Its calls without gradients.
    """

    def __init__(self, root: Any, checks: ForwardCheck) -> None:
        self.root, self.checks = root, checks
        # torch finds it in a dictionary of all modules; torch.compile would look into that, as others go.
        self.state = fsdp_state(root)
        self.running = self.method = self._back = False
        self.opener: Any = None
        self._unsharded_for_backward = self._reached = False
        self._hidden: dict[Any, None] = {}
        """States of modules whose forward returns no tensor in sight, in the order of their calls."""
        for layer in _layers_of_root(root):
            layer.register_forward_pre_hook(self._before, prepend=True)
            layer.register_forward_hook(self._after, always_call=True)
        names = {module: name for name, module in root.named_modules()}
        for state in fsdp_states(root):
            register_pre_backward_in_place(state, partial(self._hang, state))
            for module in modules_of(state):
                module.register_forward_pre_hook(partial(self._enter, state, names[module]), prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    def begin(self) -> None:
        """A call begins that no other one of this model surrounds: all that it gathers is read anew.

        Raises:
            UsageError: `torch.func.functional_call` or the like has put other tensors in the place of parts.
        """
        if backward_pass() != -1:  # computed again, for the backward that runs
            self.give_back()
            return
        if in_forward(self.state):
            self.recover()  # after a part called by itself that failed
        idle, self._back = True, False
        for group in self._groups():
            idle = idle and group.is_sharded and not is_gathered_ahead(group)
            for part in group.fsdp_params:
                info = owner_of(part)
                if info.module._parameters.get(info.param_name) is not part.sharded_param:
                    raise _swapped(info)
        if not idle:
            self._reset()
        self._unsharded_for_backward = False

    def end(self) -> None:
        """It has ended: the model has its parts again. What a backward will need stays gathered beside."""
        if backward_pass() != -1:
            return
        lends, kept = torch.is_grad_enabled(), fsdp_groups([*self._hidden])
        for group in self._groups():
            if group.is_sharded:
                continue
            if lends or group in kept:
                for part in group.fsdp_params:
                    show_part(part)
                self._unsharded_for_backward = True
            else:
                group.reshard()

    def reached(self, grad: Any) -> None:
        """A backward has come to the model, or to a part of it.

        Raises:
            UsageError: It makes a graph of gradients: a backward through that would find freed memory.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                f"create_graph=True went through {_name(self.root)}, which is split over ranks: its "
                "parameters are freed after the backward, and a second one through the gradients (a gradient "
                'penalty) would compute with other values. Use strategy="ddp" or "zero1" for this model.'
            )
        if not self._back:
            self._back = True
            self.checks.note("backward")
        self._reached = True
        self.give_back()

    def reduce_hidden(self) -> bool:
        """At the end of one, reduce the gradients that are still whole. All ranks must call this.

        Returns:
            Whether the backward went through the model.

        Raises:
            UsageError: As `reached`.
        """
        pairs = [(part, whole_of(part)) for group in self._groups() for part in group.fsdp_params]
        for part, whole in pairs:
            if whole is not None and not part.sharded_param.requires_grad:  # frozen since the forward
                whole.grad = None
        wholes = [whole for _, whole in pairs]
        left = [whole.grad for whole in wholes if whole is not None and whole.grad is not None]
        if any([grad.requires_grad for grad in left]):
            self.reached(left[0])
        if left:
            self.reduce_rest()
            finish_backward(self.state)
        for group in fsdp_groups([*self._hidden]):
            for part in group.fsdp_params:
                show_part(part)
        reached, self._reached = self._reached or bool(left), False
        return reached

    def give_back(self) -> None:
        """Use the groups that are still gathered for layers that are recomputed in backward."""
        if self._unsharded_for_backward:
            self._unsharded_for_backward = False
            for group in self._groups():
                if group.is_unsharded:
                    for part in group.fsdp_params:
                        part.to_unsharded()  # frozen, too, if its part was since the forward

    def open(self, opener: Any) -> None:
        """Gather the root group; `opener` closes it."""
        self.opener = opener
        if self.checks.check_forward():
            self.make_room()
        gather_root(self.state, self.root)

    def close(self, out: Any) -> Any:
        """Free the root group as after a forward; gives `out`, from which a backward gathers it again."""
        self.opener = None
        return free_root(self.state, self.root, out)

    def recover(self) -> None:
        """Forget a forward or backward that failed: groups are split again, half-made gradients are gone."""
        self.opener = None
        self._unsharded_for_backward = self._reached = False
        self._reset()
        for group in self._groups():
            for part in group.fsdp_params:
                if (whole := whole_of(part)) is not None:
                    whole.grad = None

    def reduce_rest(self) -> None:
        """After a pass inside of a backward: reduce the gradients of groups that were reduced before.

        Computed again for another forward, such a group looks to torch as if its hooks had already run: its
        gradients would stay whole, this rank's own, and out of `.grad`.
        """
        for group in self._groups():
            if phase(group) == "POST_BACKWARD" and group.is_unsharded:
                group.post_backward()

    def _reset(self) -> None:
        """Groups are split again; what earlier backwards left in `.grad` stays (torch 2.15 would drop it)."""
        parts = [part for group in self._groups() for part in group.fsdp_params]
        grads = [part.sharded_param.grad for part in parts]
        reset_iteration(self.root)
        for part, grad in zip(parts, grads, strict=True):
            part.sharded_param.grad = grad

    def _groups(self) -> list[Any]:
        return fsdp_groups(fsdp_states(self.root))

    def make_room(self) -> None:
        """Allocate the memory of the first all-gather outside inference_mode.

        Memory that torch allocates under inference_mode could be used only there.
        """
        if not torch.is_inference_mode_enabled():
            return
        with torch.inference_mode(False), torch.no_grad():
            for group in self._groups():
                if any([whole_of(part) is None for part in group.fsdp_params]):
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
        """A group is called. torch takes calls in PRE_BACKWARD for ones of a backward, as trials are."""
        if torch.compiler.is_compiling():
            return
        if phase(state) == "PRE_BACKWARD":
            gather_again(state)
            return
        if not (self.running or in_forward(self.state)):
            self.begin()
        if torch.is_grad_enabled() and backward_pass() == -1:
            self.checks.note(name)
        if self.checks.enter(module, name):
            self.make_room()

    def _leave(self, module: Module, args: Any, out: Any) -> None:
        self.checks.leave(module)
        if not (self.running or torch.compiler.is_compiling() or in_forward(self.state)):
            self.end()

    def _hang(self, state: Any, out: Any) -> Any:
        """In the place of torch's: what gathers before a backward hangs on what outputs are views of.

        Those of `nn.Linear` in three dimensions are views, of which `out += x` drops hooks without a word.
        """
        if not torch.is_grad_enabled():
            return out
        if in_function_transform():
            return register_pre_backward(state, out)
        if any([_is_given(leaf) for leaf in differentiable(out)]):
            out = map_tree(lambda leaf: leaf.clone() if _is_given(leaf) else leaf, out)
        leaves = [anchor(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(out)[0]]
        register_pre_backward(state, leaves)
        hooked = differentiable(leaves)
        parts = [part for group in fsdp_groups([] if hooked else [state]) for part in group.fsdp_params]
        if state not in self._hidden and any([part.sharded_param.requires_grad for part in parts]):
            # Nothing gathers it for its backward: from now on it stays gathered, until the next call.
            self._hidden[state] = None
            stay_gathered(state)
            modules_of(state)[0].unshard()
        for leaf in hooked:
            if leaf.grad_fn is not None:  # a parameter that is an output keeps its hooks for ever
                leaf.register_hook(self.reached)
        return out


class GatheredCall:
    """A forward or a method of a module that is split; a failure in it leaves the groups usable.

    Args:
        call: The module's `__call__`, or a bound method of it.
        gate: The gate of its root group.
        method: Whether it is a method: layers of the root group gather it once for the whole call.
        opens: Whether the root group is gathered before anything is called, for parameters that it reads
            itself.
    """

    __slots__ = ("call", "gate", "method", "opens")

    def __init__(
        self, call: Callable[..., Any], gate: FSDPCallGuard, method: bool, opens: bool = False
    ) -> None:
        self.call = call
        self.gate = gate
        self.method = method
        self.opens = opens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call.

        Raises:
            UsageError: A method used a parameter of its own that is split.
            CollectiveMismatch: Gradients are disabled, and other ranks are elsewhere.
        """
        gate, outer, nested = self.gate, not self.gate.running, self.gate.method
        compiling = torch.compiler.is_compiling()
        try:
            if outer and not compiling:
                gate.begin()
                if not self.method and gate.checks.enter(self):  # here, since what is compiled runs no hooks
                    gate.make_room()
            gate.running, gate.method = True, self.method or nested
            if self.opens and outer and gate.opener is None:
                gate.open(gate)
            out = self.call(*args, **kwargs)
            if gate.opener is gate and outer:
                out = gate.close(out)
        except BaseException as error:
            # Before anything is split again: it looks at what was split.
            better = translate_dtensor_error(error, self.call, gate.root, self.method, marked=self.opens)
            gate.recover()
            if better is not None:
                raise better from error
            raise
        finally:
            gate.running, gate.method = not outer, nested
            if not compiling:
                gate.checks.leave(self)
        if outer and not compiling:
            gate.end()
        return out

    def __getattr__(self, name: str) -> Any:
        if name in GatheredCall.__slots__:  # not set yet, while copying
            raise AttributeError(name)
        return getattr(self.call, name)


def _swapped(info: Any) -> UsageError:
    return UsageError(
        f"{info.param_name} of {type(info.module).__name__} is not the tensor that setup left there. A model "
        "that is split over ranks cannot be used with torch.func.functional_call or other swaps of "
        'parameters: use strategy="ddp" for them.'
    )


def _is_given(leaf: Any) -> bool:
    """Whether it is a view of an input, or of something else that was there before: as FSDP2 passes inputs
    on, torch lets nobody change such a view in place.
    """
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and anchor(leaf)._base is not None


def _name(root: Any) -> str:
    return type(root).__name__.removeprefix("FSDP")


def _layers_of_root(root: Any) -> list[Module]:
    owners = [owner_of(p) for group in fsdp_groups([fsdp_state(root)]) for p in group.fsdp_params]
    found = [m for info in owners for m in (info.module, *info.shared_modules)]
    return [m for m in dict.fromkeys(found) if m is not root]
