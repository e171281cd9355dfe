"""Calls of a module that FSDP2 splits: its root group is there when needed, and usable after a failure.

torch gathers parameters in hooks of `module(...)`. A method other than forward, or a layer called by itself,
would find them split; here the first layer of the root group that is called gathers the group. A method that
computes nothing sends nothing, so that ranks may differ in calling it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fabric.core.errors import UsageError
from fabric.core.tree import map_tree
from fabric.forward import differentiable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from fabric.strategies.layouts.evaluation import Evaluation

_SIMPLE = (torch.Tensor, tuple, list, dict)
_OWN = ("_unsharded_param", "_sharded_post_forward_param")
"""Where FSDP2 keeps what it puts in the place of a part."""


class RootGate:
    """Gathers the root group of one model at the first call of one of its layers outside of the forward.

    Args:
        root: The outermost module that `fully_shard` was called on.
        evaluation: Meets the other ranks where they need not evaluate alike; None: there are none.
    """

    def __init__(self, root: Any, evaluation: Evaluation | None = None) -> None:
        self.root = root
        # torch finds it in a dictionary of all modules; torch.compile would look into that, as others go.
        self.state = root._get_fsdp_state()
        self.evaluation = evaluation
        self.method = False
        self.opener: Any = None
        for layer in _layers_of_root(root):
            layer.register_forward_pre_hook(self._before, prepend=True)
            layer.register_forward_hook(self._after, always_call=True)

    def open(self, opener: Any) -> None:
        """Gather the root group; `opener` closes it."""
        self.opener = opener
        if self.evaluation is not None:
            self.evaluation.entering(0)
        self.state._pre_forward(self.root, (), {})

    def close(self, out: Any) -> Any:
        """Free the root group as after a forward; gives `out`, from which a backward gathers it again."""
        self.opener = None
        return self.state._post_forward(self.root, (), out)

    def recover(self) -> None:
        """Forget a forward or backward that failed: groups are split again, half-made gradients are gone."""
        self.opener = None
        self.root.reset_iter_state()
        for state in self.state._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                for part in group.fsdp_params:
                    part.unsharded_accumulated_grad = None
                    if hasattr(part, "_unsharded_param"):
                        part._unsharded_param.grad = None

    def reduce_rest(self) -> None:
        """After a pass inside of a backward: reduce the gradients of groups that were reduced before.

        Computed again for another forward, such a group looks to torch as if its hooks had already run: its
        gradients would stay whole, this rank's own, and out of `.grad`.
        """
        for state in self.state._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                if group._training_state.name == "POST_BACKWARD" and group.is_unsharded:
                    group.post_backward()

    def check(self) -> None:
        """Before a forward: a plain `loss.backward()` has not failed, and nobody has swapped parameters.

        Raises:
            UsageError: `torch.func.functional_call` or the like has put other tensors in the place of parts.
        """
        context = self.state._state_ctx
        if context.post_backward_final_callback_queued and torch._C._current_graph_task_id() == -1:
            self.recover()
        for state in context.all_states:
            for group in state._fsdp_param_groups:
                for part in group.fsdp_params:
                    here = part._module_info.module._parameters.get(part._module_info.param_name)
                    if here is not part.sharded_param and all(
                        [here is not getattr(part, n, None) for n in _OWN]
                    ):
                        raise _swapped(part._module_info)

    def _before(self, layer: Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self.opener is not None:
            return
        if self.state._training_state.name == "IDLE":
            self.open(self if self.method else layer)

    def _after(self, layer: Module, args: Any, out: Any) -> Any:
        return self.close(out) if self.opener is layer else out


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

    def __init__(self, call: Callable[..., Any], gate: RootGate, method: bool, opens: bool = False) -> None:
        self.call = call
        self.gate = gate
        self.method = method
        self.opens = opens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call.

        Raises:
            UsageError: A method used a parameter of its own that is split.
        """
        gate, nested = self.gate, self.gate.method
        evaluation = None if nested else gate.evaluation
        if evaluation is not None:
            evaluation.enter()
        try:
            gate.method = self.method or nested
            if not nested and gate.opener is None and not torch.compiler.is_compiling():
                gate.check()
            if self.opens and not nested and gate.opener is None:
                gate.open(gate)
            out = self.call(*args, **kwargs)
            if gate.opener is gate and not nested:
                out = gate.close(out)
        except BaseException as error:
            gate.recover()
            if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
                raise self._split_error() from error
            raise
        finally:
            gate.method = nested
            if evaluation is not None:
                evaluation.leave()
        if not isinstance(out, _SIMPLE):
            self._hook(out)
        return out

    def _hook(self, out: Any) -> None:
        """torch looks for outputs in plain containers only; a backward comes from others, too."""
        known = {id(leaf) for leaf in torch.utils._pytree.tree_leaves(out)}
        missed = [leaf for leaf in differentiable(out) if id(leaf) not in known]
        if missed and torch.is_grad_enabled():
            self.gate.state._register_pre_backward_hook(missed)

    def _split_error(self) -> UsageError:
        name = getattr(self.call, "__name__", type(self.call).__name__)
        model = type(self.gate.root).__name__.removeprefix("FSDP")
        if not self.method:
            return UsageError(
                f"The forward of {model} uses a parameter of a layer that it does not call, while the layer "
                "is a group of its own and split. Leave the class of that layer out of auto_wrap_policy."
            )
        return UsageError(
            f"{model}.{name} uses a parameter that is split over ranks outside of its layer's call. Write "
            f"model.mark_forward_method({name!r}) after fabric.setup, or call the layer that holds the "
            "parameter."
        )

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


def own_output(module: Module, args: Any, out: Any) -> Any:
    """A forward hook: views (outputs of `nn.Linear` in three dimensions) become tensors of their own.

    FSDP2 hangs the gathering before a backward on outputs; `out += x` on a view would silently drop that.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    if isinstance(out, torch.Tensor):
        return out.clone() if _is_view(out) else None
    if not any([_is_view(leaf) for leaf in differentiable(out)]):
        return None
    return map_tree(lambda leaf: leaf.clone() if _is_view(leaf) else leaf, out)


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._base is not None


def _layers_of_root(root: Any) -> list[Module]:
    groups = root._get_fsdp_state()._fsdp_param_groups
    owners = [p._module_info for group in groups for p in group.fsdp_params]
    found = [m for info in owners for m in (info.module, *info.shared_modules)]
    return [m for m in dict.fromkeys(found) if m is not root]
