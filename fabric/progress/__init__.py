"""`fabric.progress`: a bar of tqdm on one rank."""
