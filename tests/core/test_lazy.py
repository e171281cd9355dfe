import importlib
import subprocess
import sys

import pytest

PACKAGES = ["fabric.utilities", "fabric.loggers"]
HEAVY = ["lightning_utilities", "torchmetrics", "tensorboard", "fsspec", "torch.utils.tensorboard"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_loads_from_where_it_is_defined(package):
    module = importlib.import_module(package)
    assert module.__all__ == sorted(module.__all__)
    assert dir(module) == module.__all__
    for name in module.__all__:
        value = getattr(module, name)
        assert getattr(value, "__module__", "fabric").startswith("fabric.")
        assert vars(module)[name] is value


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_name_error_says_what_there_is(package):
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=rf"'{package}' has no attribute 'nothing'.*{module.__all__[0]}"):
        module.nothing  # noqa: B018


def test_imports_are_light():
    code = f"""
import sys, torch
before = set(sys.modules)
import fabric.utilities, fabric.loggers
assert "fabric.utilities.seed" not in sys.modules, "packages must be lazy"
from fabric.loggers import CSVLogger, TensorBoardLogger
from fabric.core import cores
from fabric.utilities import apply_func, cloud_io, data, distributed, init
from fabric.utilities import rank_zero, seed, types, warnings
new = set(sys.modules) - before
loaded = [name for name in {HEAVY!r} if name in new]
assert not loaded, loaded
assert len([name for name in new if not name.startswith("fabric")]) < 10, sorted(new)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
