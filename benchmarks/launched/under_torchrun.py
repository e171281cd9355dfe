"""Two ranks of torch alone under torchrun to their first barrier."""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
