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


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("from fabric import DDPStrategy", "from fabric.strategies import DDPStrategy"),
        ("from fabric import FSDPStrategy", "from fabric.strategies import FSDPStrategy"),
        ("from fabric import TensorBoardLogger", "from fabric.loggers import TensorBoardLogger"),
        ("from fabric import CSVLogger", "from fabric.loggers import CSVLogger"),
        ("from fabric import rank_zero_only", "from fabric.utilities import rank_zero_only"),
        ("from fabric import CPUAccelerator", "from fabric.accelerators import CPUAccelerator"),
        ("from fabric import Precision", "from fabric.plugins import Precision"),
        ("from fabric import SLURMEnvironment", "from fabric.plugins.environments import SLURMEnvironment"),
        ("from fabric import RankPool", "from fabric.testing import RankPool"),
        ("from fabric import RankError", "from fabric.core.errors import RankError"),
        ("from fabric.strategies import CSVLogger", "from fabric.loggers import CSVLogger"),
        ("import fabric; fabric.DDPStrategy()", "from fabric.strategies import DDPStrategy"),
    ],
)
def test_a_name_of_another_package_is_an_error_with_the_line_to_write(line, right):
    with pytest.raises(ImportError, match=rf"cannot import name '\w+' from 'fabric[.a-z]*'. Write: {right}$"):
        exec(line, {})
    exec(right, {})


def test_submodules_and_unknown_names_cost_no_import():
    code = """
import sys
from fabric import loggers, plugins, strategies
import fabric
assert not hasattr(fabric, "Trainer") and not hasattr(fabric, "nothing")
assert "torch" not in sys.modules, "an import of torch"
from fabric import Fabric, is_wrapped, plan, seed_everything
"""
    subprocess.run([sys.executable, "-c", code], check=True)
