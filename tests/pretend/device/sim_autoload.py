"""Entry point of the group "torch.backends": with this folder on the path, `import torch` gives the device.

So ranks that are started anew, scripts among them, have it as they would have a vendor's. Where it cannot be
built, torch stays as it is, and tests that ask for the device are skipped with the reason.
"""

from __future__ import annotations


def load() -> None:
    import sim_build

    if not sim_build.missing():
        import sim  # noqa: F401
