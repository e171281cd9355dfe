"""A model in stages, one on each rank of a pipeline, fed with micro-batches."""
