"""Limits of the machine in PyTorch: a bare GEMM, a bare read of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_export.bench.feeds import Feed, Prepared
from attn_export.bench.peers_plain import prepare_torch, tensor


def make(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a roofline ready to run.

    Args:
        options: ``gemm``, the sizes [M, K, N] of a product; or ``read``, so many floats.
        threads: Threads for computing.
    """
    prepare_torch(threads)
    if "gemm" in options:
        M, K, N = options["gemm"]
        a, b = tensor(Feed((M, K)), 0), tensor(Feed((K, N)), 1)
        out = torch.empty(M, N)
        return Prepared(lambda: torch.mm(a, b, out=out))
    numbers = tensor(Feed((options["read"],)), 0)
    return Prepared(numbers.sum)
