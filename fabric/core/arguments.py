"""Decorators of the methods of `Fabric` that explain wrong arguments; checks of flags, paths, groups, limits
and numbers of items, before any change; errors of attributes that set-up objects lack.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from numbers import Integral, Real
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fabric.core.errors import ArgumentTypeError, ConfigurationError
from fabric.core.messages import kind_of, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fabric.core.compile import Verb

K = TypeVar("K", bound=type)
_STATE = '{"model": model}'
_PATHS = {
    "fabric.save": f"fabric.save(path, {_STATE})",
    "fabric.load": f"fabric.load(path, {_STATE})",
    "fabric.load_raw": "fabric.load_raw(path, model)",
    "fabric.save_latest": f'fabric.save_latest("checkpoints", {_STATE}, step=step)',
    "fabric.load_latest": f'fabric.load_latest("checkpoints", {_STATE})',
    "fabric.profile": 'fabric.profile("trace")',
}
"""What to write, by verb with a path."""


def check_arguments(
    verb: str, checks: Mapping[str, Callable[[str, str, Any], None]], given: Iterable[tuple[str, Any]]
) -> None:
    """Raise for the first argument whose value is of a wrong kind.

    Args:
        verb: The caller, for messages.
        checks: A function of `CHECKS` for each argument that has one.
        given: Names and values.

    Raises:
        ArgumentTypeError: A value is of a wrong kind.
        ConfigurationError: A path is empty.
    """
    for name, value in given:
        if (check := checks.get(name)) is not None:
            check(verb, name, value)


def _check_flag(verb: str, name: str, value: Any) -> None:
    if value is not None and value is not True and value is not False:
        check_flags(verb, **{name: value})


def _check_truth(verb: str, name: str, value: Any) -> None:
    """Raise unless `value` is a flag, a number or a tensor: `enabled=i % 4`."""
    if not isinstance(value, Real | torch.Tensor):
        check_flags(verb, **{name: value})


def _check_group(verb: str, name: str, value: Any) -> None:
    members = getattr(torch.distributed, "GroupMember", None)
    if value is None or value is getattr(members, "NON_GROUP_MEMBER", None):  # the collective raises
        return
    if callable(getattr(value, "size", None)) and callable(getattr(value, "rank", None)):
        return
    reduction = ""
    if verb in ("fabric.all_reduce", "fabric.reduce_scatter"):
        operation = value if value in ("mean", "min", "max", "product") else "sum"
        reduction = f', reduce_op="{operation}"'
    raise ArgumentTypeError(
        f"{verb}: {name}={show(value)} is not a process group. Write {verb}(data{reduction}), or "
        f"{name}=torch.distributed.new_group(ranks)."
    )


def _check_path(verb: str, name: str, value: Any) -> None:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{verb} needs a path, but got {kind_of(value)}. Write {_PATHS[verb]}.")
    if name == "path" and not str(value):
        raise ConfigurationError(f'{verb}: the path is empty. Write {verb}("checkpoint.pt", state).')


def _check_label(verb: str, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, str | Real):
        raise ArgumentTypeError(f'{verb}: {name}={kind_of(value)} is not a text. Write {name}="epoch 0".')


def _check_step(verb: str, name: str, value: Any) -> None:
    if value is not None and not isinstance(value, Real | torch.Tensor):
        raise ArgumentTypeError(
            f"{verb}: {name}={show(value)} is not a number. Write {name}=step, your counter."
        )


CHECKS: dict[str, Callable[[str, str, Any], None]] = {
    "bool": _check_flag,
    "bool | None": _check_flag,
    "PathLike": _check_path,
    "enabled": _check_truth,
    "workers": _check_truth,
    "group": _check_group,
    "desc": _check_label,
    "name: str | None": _check_label,
    "step: int | None": _check_step,
}
"""Checks by the annotation of an argument, by its name, or by both; the last one that is found counts."""


def explains_arguments(cls: K) -> K:
    """Decorate a class: its public methods, and `__init__`, explain arguments that they do not take."""
    for name, method in list(vars(cls).items()):
        is_public = name[0] != "_" or name == "__init__"
        if is_public and isinstance(method, FunctionType) and not hasattr(method, "explains_arguments"):
            setattr(cls, name, _explained(method, cls.__name__ if name == "__init__" else f"fabric.{name}"))
    return cls


def collective(method: Verb) -> Verb:
    """Decorate a method that needs `launch`. It also runs as plain Python in compiled functions, like
    `eager_verb`.
    """
    wrapped: Verb = _explained(method, f"fabric.{method.__name__}", needs_launch=True, is_eager=True)
    return wrapped


def eager_verb(method: Verb) -> Verb:
    """Decorate a method that runs as plain Python also in compiled functions."""
    wrapped: Verb = _explained(method, f"fabric.{method.__name__}", is_eager=True)
    return wrapped


def explain_arguments(verb: str, method: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raise ArgumentTypeError if `method`, after a TypeError, does not take these arguments (with `self`)."""
    from fabric.core.advice import argument_text

    if (text := argument_text(verb, method, args, given)) is not None:
        raise ArgumentTypeError(text) from None


def _explained(method: Any, verb: str, *, needs_launch: bool = False, is_eager: bool = False) -> Any:
    """Return `method` with checks of the kinds of its arguments, and with errors for unknown ones.

    One frame for all of it: these methods are called in each step.
    """
    inner = inspect.unwrap(method)
    names = inner.__code__.co_varnames[: inner.__code__.co_argcount]  # with `self`
    checks = {
        name: CHECKS[key]
        for name, kind in inner.__annotations__.items()
        for key in (kind, name, f"{name}: {kind}")
        if key in CHECKS
    }
    checked = checks.keys()
    # With no more positional arguments than this, and no keyword of `checked`, nothing is checked.
    unchecked = next((i for i, name in enumerate(names) if name in checks), sys.maxsize)
    plain: Any = None

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plain
        if needs_launch and not args[0]._launched:
            args[0]._require_launch(f"{method.__name__}()")
        try:
            if len(args) > unchecked or (kwargs and not checked.isdisjoint(kwargs)):
                check_arguments(verb, checks, (*zip(names, args, strict=False), *kwargs.items()))
            if not is_eager or "torch._dynamo" not in sys.modules:
                return method(*args, **kwargs)
            if plain is None:
                import torch

                plain = torch.compiler.disable(method)
            return plain(*args, **kwargs)
        except TypeError:
            explain_arguments(verb, method, args, kwargs)
            raise

    call.explains_arguments = True  # type: ignore[attr-defined]
    return call


def check_flags(verb: str, **flags: Any) -> None:
    """Raise ArgumentTypeError for a flag of `verb` that is not a bool, None, 0 or 1."""
    for name, value in flags.items():
        if not (
            value is None
            or type(value).__name__ in ("bool", "bool_")
            or (isinstance(value, int) and value in (0, 1))
        ):
            is_optimizer = hasattr(value, "param_groups")
            advice = " Write model, optimizer = fabric.setup(model, optimizer)." * is_optimizer
            raise ArgumentTypeError(f"{verb}: {name}={show(value)} must be True or False.{advice}")


def check_limits(clip_val: Any, max_norm: Any, norm_type: Any) -> None:
    """Raise unless exactly one limit of `clip_gradients` is given, and it is a number of 0 or more.

    Raises:
        ArgumentTypeError: A limit is not a number.
        ConfigurationError: Both limits, none, a negative one or NaN.
    """
    advice = "Write clip_val=0.5 to clamp each element, or max_norm=1.0 to scale the total norm."
    if (clip_val is None) == (max_norm is None):
        raise ConfigurationError(
            f"clip_gradients needs one limit, but got clip_val={clip_val!r} and max_norm={max_norm!r}. "
            f"{advice}"
        )
    norm_type = float(norm_type) if norm_type == "inf" else norm_type  # torch accepts this text, too
    for name, value in {"clip_val": clip_val, "max_norm": max_norm, "norm_type": norm_type}.items():
        if isinstance(value, str | bool):
            raise ArgumentTypeError(f"clip_gradients: {name}={value!r} must be a number. {advice}")
        if value is not None and not value >= 0:
            raise ConfigurationError(f"clip_gradients: {name}={value!r} must be 0 or more. {advice}")


def item_count(value: Any, verb: str) -> int | float:
    """Return a number of items as a Python number; for a tensor on a device the host waits.

    Raises:
        ArgumentTypeError: Neither a real number nor a tensor with one.
        ConfigurationError: Negative, not finite, or too large for 64 bits.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(
            f"{verb} needs num_items as a number or a one-element tensor, but got {value!r}. "
            f"Count the items of all micro-batches of the step on this rank: num_items += mask.sum()"
        )
    count = int(value) if isinstance(value, Integral) else float(value)
    if not 0 <= count < 2**63:
        raise ConfigurationError(
            f"{verb}: num_items={count} is not a number of items: it must be 0 or more, finite, and less "
            f"than 2**63. Count the items of all micro-batches of the step on this rank."
        )
    return count


def attribute_of(kind: str, holder: Any, name: str) -> Any:
    """Return an attribute of the user's object that was set up. Raises what `missing_attribute` returns."""
    try:
        return getattr(holder, name)
    except AttributeError as error:
        raise missing_attribute(kind, holder, name, error)  # noqa: B904 - it may be the same, with its cause


def missing_attribute(kind: str, holder: Any, name: str, error: AttributeError) -> AttributeError:
    """Return the error to raise for an attribute that a set-up object lacks.

    Args:
        kind: "model", "optimizer" or "loader".
        holder: The user's object.
        name: The attribute.
        error: What `holder` raised; returned unless there is advice for the name.
    """
    if name.startswith("_") or hasattr(type(holder), name):  # the error is of a property
        return error
    from fabric.core.advice import wrapper_error

    return wrapper_error(kind, name, error)
