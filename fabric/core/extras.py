"""Packages that an optional part needs: `require` asks whether they are there, `needed` imports one."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fabric.core.errors import MissingExtraError

if TYPE_CHECKING:
    from types import ModuleType


def require(asked: str, extra: str, *packages: str) -> None:
    """Raise unless all `packages` are installed: on every rank, also where only rank zero would use them.

    Args:
        asked: What the user wrote that needs them: "WandbLogger".
        extra: The extra of `torch-fabric` that installs them.
        packages: Names as they are imported; they are not imported.

    Raises:
        MissingExtraError: One of them is not installed.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"{asked} needs {' and '.join(missing)}, not installed here. {_remedy(extra)}"
        )


def needed(
    module: str, asked: str, extra: str, package: str | None = None, least: str = "", instead: str = ""
) -> ModuleType:
    """The imported module `module`.

    Args:
        module: What is imported: "horovod.torch".
        asked: What the user wrote that needs it: 'strategy="horovod"'.
        extra: The extra of `torch-fabric` that installs it, or a whole command where pip alone cannot.
        package: The distribution, where it has another name than the module.
        least: The oldest version that will do, as numbers with dots.
        instead: What to write where it cannot be installed.

    Raises:
        MissingExtraError: It is not installed, does not load, or is older than `least`.
    """
    package = package or module.partition(".")[0]
    remedy = _remedy(extra, instead)
    try:
        found = version(package)
    except PackageNotFoundError:
        raise MissingExtraError(
            f"{asked} needs the package {package}, which is not installed. {remedy}"
        ) from None
    if least and _numbers(found) < _numbers(least):
        raise MissingExtraError(
            f"{asked} needs {package} {least} or newer, but {found} is installed. {remedy}"
        )
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            f"{asked} needs {package}, of which {found} is installed and does not load: "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _remedy(extra: str, instead: str = "") -> str:
    command = extra if " " in extra else f'pip install "torch-fabric[{extra}]"'
    return f"Run `{command}`{', or ' + instead if instead else ''}."
