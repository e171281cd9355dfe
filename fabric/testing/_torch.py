"""Private names of torch that this folder uses; `tests/core/test_torch_internals.py` tests each."""

from __future__ import annotations

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

Dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
"""The classes of all dropouts, for `isinstance`; torch's common base class is private."""
