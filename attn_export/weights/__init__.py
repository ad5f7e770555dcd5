"""Checkpoints: one attention layer of a safetensors file, and mean-pooling of its K/V heads."""

from attn_export.weights.checkpoint import Checkpoint, load_checkpoint
from attn_export.weights.layouts import pool

__all__ = ["Checkpoint", "load_checkpoint", "pool"]
