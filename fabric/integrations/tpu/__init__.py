"""TPUs by `torch_tpu`, and what became of torch_xla."""
