"""Parameters that two models share, such as the encoder of actor and critic: they have their own replica.

A DDP reducer waits for all of its parameters, but a backward may go through one of the models only.
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
        parameters: {parameter: its name}.
        one: The first model.
        other: The second model.
    """

    def __init__(self, parameters: dict[Parameter, str], one: Module, other: Module) -> None:
        super().__init__()
        self.__dict__[MODEL_NAME] = f"{name_of(one)} with {name_of(other)}"
        buffers = {*other.buffers()}
        self._parameters.update({name: p for p, name in parameters.items()})  # names with dots
        self._buffers.update({name: b for name, b in one.named_buffers() if b in buffers})


def replicas_reducing(replica: Any, states: Any) -> list[Any]:
    """Return the replicas that reduce parameters of one model: itself, and those of shared parameters."""
    shared = states[replica].shared
    return [replica, *itertools.chain(*[replicas_reducing(one, states) for one in shared])]
