"""Optional dependencies: `require_packages` checks that they are installed, `import_package` imports one."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fabric.core.errors import MissingExtraError

if TYPE_CHECKING:
    from types import ModuleType


def require_packages(feature: str, extra: str, *packages: str) -> None:
    """Raise unless all `packages` are installed. For all ranks, even if only rank zero imports them.

    Args:
        feature: The user's code that needs them: "WandbLogger".
        extra: The extra of `torch-fabric` that installs them.
        packages: Import names; they are not imported.

    Raises:
        MissingExtraError: One of them is not installed.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"{feature} needs {' and '.join(missing)}, not installed here. {_remedy(extra)}"
        )


def import_package(
    module: str, feature: str, extra: str, package: str | None = None, least: str = "", instead: str = ""
) -> ModuleType:
    """Import and return a module of an optional dependency.

    Args:
        module: The module to import: "horovod.torch".
        feature: The user's code that needs it: 'strategy="horovod"'.
        extra: The extra of `torch-fabric` that installs it, or a shell command if pip alone cannot.
        package: The distribution, if its name differs from the module's.
        least: The oldest supported version, as numbers with dots.
        instead: An alternative to installing it, for the error.

    Raises:
        MissingExtraError: It is not installed, does not import, or is older than `least`.
    """
    package = package or module.partition(".")[0]
    remedy = _remedy(extra, instead)
    try:
        found = version(package)
    except PackageNotFoundError:
        raise MissingExtraError(
            f"{feature} needs the package {package}, which is not installed. {remedy}"
        ) from None
    if least and _numbers(found) < _numbers(least):
        raise MissingExtraError(
            f"{feature} needs {package} {least} or newer, but {found} is installed. {remedy}"
        )
    try:
        return import_module(module)
    except (ImportError, OSError) as error:
        raise MissingExtraError(
            f"{feature} needs {package}, of which {found} is installed and does not load: "
            f"{type(error).__name__}: {error}. {remedy}"
        ) from error


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def _remedy(extra: str, instead: str = "") -> str:
    command = extra if " " in extra else f'pip install "torch-fabric[{extra}]"'
    return f"Run `{command}`{', or ' + instead if instead else ''}."
