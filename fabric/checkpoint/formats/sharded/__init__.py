"""Sharded checkpoints: each rank writes its part (torch.distributed.checkpoint)."""
