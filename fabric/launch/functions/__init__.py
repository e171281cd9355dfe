"""Ranks that run a function: spawn, fork, forkserver, notebooks."""
