"""Layers of NVIDIA's Transformer Engine, in float8 on the GPUs that have it."""
