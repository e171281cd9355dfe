"""`python -m fabric.integrations.deepspeed DIRECTORY FILE`: convert a DeepSpeed checkpoint to one file."""

import argparse

from fabric.integrations.deepspeed.checkpoints import consolidate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fabric.integrations.deepspeed", description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("file")
    options = parser.parse_args()
    consolidate(options.directory, options.file)
