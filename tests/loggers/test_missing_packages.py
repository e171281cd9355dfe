"""A logger whose package is not there says so when it is made, on every rank, and what to write."""

import re
import sys

import pytest

from fabric.core.errors import MissingExtraError
from fabric.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from fabric.utilities.rank_zero import rank_zero_only

MADE = {
    "TensorBoardLogger needs tensorboard": ("tensorboard", lambda: TensorBoardLogger("logs")),
    "WandbLogger needs wandb": ("wandb", WandbLogger),
    "MLFlowLogger needs mlflow": ("mlflow", lambda: MLFlowLogger(tracking_uri="http://localhost:5000")),
    "MLFlowLogger needs mlflow and sqlalchemy and alembic": ("mlflow", MLFlowLogger),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("text", MADE)
def test_missing_package_says_what_to_install(monkeypatch, text, rank):
    extra, make = MADE[text]
    for package in ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(rank_zero_only, "_rank", rank)
    whole = f'{text}, not installed here. Run `pip install "torch-fabric[{extra}]"`.'
    with pytest.raises(MissingExtraError, match=f"^{re.escape(whole)}$"):
        make()
