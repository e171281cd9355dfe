"""`python -m fabric run ...`: the command line without the installed script."""

import sys

from fabric.cli import main

if __name__ == "__main__":
    sys.exit(main())
