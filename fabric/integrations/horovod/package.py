"""The package itself, or how it is installed."""

from __future__ import annotations

from typing import Any

from fabric.utilities.extras import needed

_INSTALL = "bash tests/integrations/horovod/install.sh VENV"


def load_horovod() -> Any:
    """`horovod.torch`, initialised: this process has its place among the others.

    Raises:
        MissingExtraError: Horovod is not installed, or does not load. Pip alone does not build 0.28 against
            torch 2.13; the script does.
    """
    instead = 'write strategy="ddp", which needs nothing else'
    horovod = needed("horovod.torch", 'strategy="horovod"', _INSTALL, least="0.28", instead=instead)
    horovod.init()
    return horovod
