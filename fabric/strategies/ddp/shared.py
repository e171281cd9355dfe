"""Parameters that two models share, such as an encoder of actor and critic: `Replicate` reduces them itself.

A DDP reducer waits for all of its parameters, and a backward may go through one of the models alone.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from fabric.utilities.init import MODEL_NAME, name_of

if TYPE_CHECKING:
    from torch.nn import Parameter


class SharedParameters(Module):
    """The parameters and buffers that two models have, by their names in the first of them.

    Args:
        parameters: With their names.
        one: The first model.
        other: The second one.
    """

    def __init__(self, parameters: dict[Parameter, str], one: Module, other: Module) -> None:
        super().__init__()
        self.__dict__[MODEL_NAME] = f"{name_of(one)} with {name_of(other)}"
        buffers = {*other.buffers()}
        self._parameters.update({name: p for p, name in parameters.items()})  # names with dots
        self._buffers.update({name: b for name, b in one.named_buffers() if b in buffers})


def reducing(replica: Any, known: Any) -> list[Any]:
    """The replicas that reduce the parameters of one, by what is known of each: itself, and shared ones."""
    return [replica, *itertools.chain(*[reducing(shared, known) for shared in known[replica].shared])]
