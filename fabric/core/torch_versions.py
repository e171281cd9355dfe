"""All code that depends on the version of torch. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fabric.core.errors import MissingExtraError

FLOOR = "2.9"  # as in pyproject.toml
BUFFER_KEYWORDS = ("broadcast_buffers", "forward_sync_buffers")  # DDP's, and from torch 2.13 on


def torch_version() -> str | None:
    """Return the version of the installed torch, also before its import; None: unknown or not installed."""
    torch = sys.modules.get("torch")
    spec = find_spec("torch") if torch is None else None
    if spec is None or spec.origin is None:
        return getattr(torch, "__version__", None)
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return next(iter(re.findall(r"^__version__\b.*?= *['\"]([^'\"]+)", text, re.MULTILINE)), None)


def older_than(version: str) -> bool:
    """Whether torch is older than a version, such as "2.13"; a nightly build of it is not."""
    numbers = [re.findall(r"\d+", text)[:2] for text in (torch_version() or version, version)]
    return [*map(int, numbers[0])] < [*map(int, numbers[1])]


def require_torch(version: str, feature: str, instead: str) -> None:
    """Raise MissingExtraError if torch is older than `version`, which `feature` needs."""
    if older_than(version):
        why = f"needs torch {version} or newer, but {torch_version()} is installed"
        raise MissingExtraError(f"{feature} {why}. {instead}")


def check_floor() -> None:
    """Raise MissingExtraError if torch is older than FLOOR; call it before torch is imported."""
    require_torch(FLOOR, "fabric", f'Run `pip install "torch>={FLOOR}"`.')


def buffers_off(ddp: Any) -> dict[str, bool]:
    """Return the keyword argument that turns DDP's buffer broadcast off."""
    return {BUFFER_KEYWORDS[BUFFER_KEYWORDS[1] in ddp.__init__.__code__.co_varnames]: False}


@contextmanager
def collectives_recorded() -> Any:
    """Context to create a process group in, so that its flight recorder is on also in torch 2.9 and 2.10."""
    name = "TORCH_FR_BUFFER_SIZE"
    variables = {name: "2000"} if older_than("2.11") and name not in os.environ else {}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def start_all_gather_flat(output: Any, tensor: Any, group: Any) -> Any:
    """Start an all-gather into one tensor and return its Work. torch 2.13 renamed the function."""
    import torch.distributed as dist

    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    return getattr(dist, name)(output, tensor, group=group, async_op=True)


def all_to_all(outputs: list[Any], inputs: list[Any], group: Any) -> None:
    """Run `torch.distributed.all_to_all`; gloo lacks it before torch 2.12, and sends one tensor of bytes."""
    import torch
    import torch.distributed as dist

    if not older_than("2.12") or dist.get_backend(group) != "gloo":
        dist.all_to_all(outputs, inputs, group=group)
        return
    sent = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in inputs]
    sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
    received = sent[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(sent), sizes, [*map(len, sent)], group=group)
    for output, part in zip(outputs, received.split(sizes), strict=True):
        output.copy_(part.clone().view(output.dtype).view(output.shape))


def groups_of(state: Any) -> list[Any]:
    """Return FSDP2's parameter groups of a module; older versions of torch have at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (state._fsdp_param_group,) if group] if groups is None else [*groups]


@contextmanager
def states_hidden(state: Any, hide: Any) -> Any:
    """Context in which FSDP2's search for modules below a root skips states with `hide(state)`."""
    old, name = "_get_module_fsdp_state", "_get_state_for_module"
    owner, name = (state, name) if hasattr(state, name) else (sys.modules[type(state).__module__], old)
    find = getattr(owner, name)
    vars(owner)[name] = lambda module: None if (found := find(module)) is None or hide(found) else found
    try:
        yield
    finally:
        vars(owner).pop(name)
        vars(owner).update({} if owner is state else {name: find})


def unshard_again(state: Any) -> None:
    """Unshard a module that a backward recomputes, if a nested backward resharded it. torch 2.11 does so."""
    for group in () if hasattr(state, "_cast_forward_inputs") else groups_of(state):
        group.unshard()
        group.wait_for_unshard()


def preserve_arguments(group: Any, differentiable: Any) -> None:
    """Make FSDP2 pass lists and dicts without gradients to forward itself. torch 2.9 passes copies."""
    register = group._register_post_backward_hook

    def register_without_copies(args: Any, kwargs: Any) -> Any:
        new, named = register(args, kwargs)
        new = tuple([n if differentiable(old) else old for n, old in zip(new, args, strict=True)])
        return new, {key: named[key] if differentiable(old) else old for key, old in kwargs.items()}

    if older_than("2.12"):
        group._register_post_backward_hook = register_without_copies


def reset_iteration(root: Any) -> None:
    """Reset FSDP2's state after a failed forward or backward, and reshard. torch 2.13 has this itself."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    shared, context = (state := root._get_fsdp_state())._comm_ctx, state._state_ctx
    state._device_handle.synchronize()
    for group in [group for inner in context.all_states for group in groups_of(inner)]:
        getattr(getattr(group._all_gather_result, "all_gather_work", None), "wait", bool)()
        group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
        group._post_reduce_event = group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()
    for inner in context.all_states:
        inner._modules_to_run_forward.clear()
        inner._training_state = type(inner._training_state).IDLE
    shared.all_gather_state = shared.reduce_scatter_state = None  # newer versions have lists of them
    getattr(shared, "reduce_scatter_states", []).clear()
    shared.post_forward_order.clear()
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
