"""Tests with real engines: each folder is collected only in the environment that has its package.

`make test-engines` makes those environments (`tests/integrations/__main__.py`) and sets FABRIC_ENGINE.
"""

import os
from pathlib import Path

HERE = Path(__file__).parent
collect_ignore = [
    path.name for path in HERE.iterdir() if path.is_dir() and path.name != os.environ.get("FABRIC_ENGINE")
]
