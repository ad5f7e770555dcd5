"""Checkpoints in: one attention of a safetensors file as our weights, and pooled K/V heads."""

from attn_export.weights.checkpoint import Checkpoint, load_checkpoint
from attn_export.weights.layouts import pool

__all__ = ["Checkpoint", "load_checkpoint", "pool"]
