"""Report hangs: where all ranks are, by rank, call, file and line."""
