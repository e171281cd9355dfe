"""How processes come to be: re-executed script, spawn/fork/forkserver; and the supervisor that ends them."""
