"""Ranks started as processes that run a function: spawn, fork, forkserver, notebooks."""
