"""Checkpoints: one attention layer of a safetensors file, and mean-pooling of its K/V heads."""
