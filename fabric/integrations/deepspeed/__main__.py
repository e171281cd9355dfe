"""`python -m fabric.integrations.deepspeed DIRECTORY FILE`: one plain file of a directory of DeepSpeed's."""

import argparse

from fabric.integrations.deepspeed.checkpoints import consolidate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fabric.integrations.deepspeed", description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("file")
    given = parser.parse_args()
    consolidate(given.directory, given.file)
