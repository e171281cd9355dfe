"""Private names of torch's graphs and of `torch.compile`, which `core/test_torch_internals.py` tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module


def saved(node: Any, name: str) -> Any:
    """Return the value that a node of a loss's graph saved for its backward as `name`; None: it has none."""
    return getattr(node, f"_saved_{name}", None)


def shape_of(node: Any, index: int = 0) -> tuple[int, ...]:
    """Return the shape of a value that a node of a loss's graph computed; `index`: which of several."""
    return (*node._input_metadata[index].shape,)


def is_nested(node: Any) -> bool:
    """Whether a node of a loss's graph computed a nested tensor, which has no shape."""
    return any([each.is_nested_tensor for each in node._input_metadata[:1]])


def watch_compiled(module: Module, on_call: Callable[[Any, Any, Any], None]) -> None:
    """Call `on_call(module, args, kwargs)` before each call of a compiled version of a module.

    `torch.compile(module)` calls the method that initialises lazy modules, outside of what it traces.
    """
    vars(module).update(_initialize_hook=do_nothing, _infer_parameters=on_call)


def unwatch_compiled(module: Module, is_compiled: bool) -> None:
    """Undo `watch_compiled`. A compiled version would search a deleted method in each call."""
    if is_compiled:
        vars(module)["_infer_parameters"] = do_nothing
    else:
        for name in ("_initialize_hook", "_infer_parameters"):
            vars(module).pop(name, None)


def do_nothing(module: Any, args: Any, kwargs: Any) -> None:
    """Do nothing before a call of a compiled module."""


def wrap_compiled_call(module: Module, wrap: Callable[[Any], Any]) -> None:
    """Replace the function that `module.compile()` has made, if there is one, by `wrap` of it."""
    if (compiled := vars(module).get("_compiled_call_impl")) is not None:
        vars(module)["_compiled_call_impl"] = wrap(compiled)
