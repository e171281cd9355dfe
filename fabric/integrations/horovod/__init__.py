"""Horovod: averages gradients of ranks that `horovodrun` or `mpirun` started."""

from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports

if TYPE_CHECKING:
    from fabric.integrations.horovod.rates import scale_learning_rate as scale_learning_rate
    from fabric.integrations.horovod.strategy import HorovodStrategy as HorovodStrategy

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "HorovodStrategy": "fabric.integrations.horovod.strategy",
        "scale_learning_rate": "fabric.integrations.horovod.rates",
    },
)
