"""The public names of `fabric`. They load lazily: `import fabric` does not import torch."""

import os
from typing import TYPE_CHECKING

from fabric.core.lazy import lazy_exports
from fabric.core.torch_versions import check_floor

if TYPE_CHECKING:
    from fabric.fabric import Fabric as Fabric
    from fabric.tools.plan.plan import plan as plan
    from fabric.utilities.seed import seed_everything as seed_everything
    from fabric.wrappers import is_wrapped as is_wrapped

__version__ = "0.1.0"

check_floor()
if "FABRIC_REPORT_FD" in os.environ:  # a rank of `fabric run`: errors before Fabric(...) are reported, too
    from fabric.launch.parent_death import report_to_supervisor

    report_to_supervisor()

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Fabric": "fabric.fabric",
        "is_wrapped": "fabric.wrappers",
        "plan": "fabric.tools.plan.plan",
        "seed_everything": "fabric.utilities.seed",
    },
)
