"""TPUs with `torch_tpu`; and names of torch_xla, which raise errors."""
