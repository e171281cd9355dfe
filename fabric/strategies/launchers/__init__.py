"""Launchers of the ranks: re-executed script, spawn/fork/forkserver; and the supervisor that ends them."""
