"""`require`: packages that an optional part needs, asked for before any work is done. Imports none."""

from importlib.util import find_spec

from fabric.core.errors import MissingExtraError


def require(asked: str, extra: str, *packages: str) -> None:
    """Raise unless all `packages` are installed: on every rank, also where only rank zero would use them.

    Args:
        asked: What the user wrote that needs them: "WandbLogger".
        extra: The extra of `torch-fabric` that installs them.
        packages: Names as they are imported.

    Raises:
        MissingExtraError: One of them is not installed.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtraError(
            f"{asked} needs {' and '.join(missing)}, not installed here. "
            f'Run `pip install "torch-fabric[{extra}]"`.'
        )
