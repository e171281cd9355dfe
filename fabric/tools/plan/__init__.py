"""`fabric plan`: memory, traffic and the largest batch size of a training script, by strategy."""
