"""Layers of NVIDIA's Transformer Engine, in float8 on GPUs that support it."""
