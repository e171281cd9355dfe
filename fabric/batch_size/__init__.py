"""The largest batch size that fits on all ranks (`fabric.find_batch_size`)."""
