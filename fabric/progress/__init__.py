"""`fabric.progress`: a tqdm bar on one rank."""
