"""Modules in PyTorch as candidates: their tensors, and rooflines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attn_export.bench.feeds import Feed, Prepared, filled


def prepare_torch(threads: int) -> None:
    """Set the number of threads, and compute float32 products in full precision."""
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def tensor(feed: Feed, seed: int) -> Tensor:
    """Return a tensor of a feed's shape and dtype, in memory aligned as that of other candidates.

    Args:
        feed: The description of the array.
        seed: Seed of the values.
    """
    array = filled(feed, seed)
    if feed.dtype == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensors(feeds: Mapping[str, Feed]) -> dict[str, Tensor]:
    """Return the tensors of feeds by name, with the position of each as its seed."""
    return {name: tensor(feed, seed) for seed, (name, feed) in enumerate(feeds.items())}


def ready(module: nn.Module, inputs: Mapping[str, Tensor], *, compiled: bool) -> Prepared:
    """Return a module and its inputs as a candidate that is ready to run.

    Args:
        module: The module to run.
        inputs: Its inputs by name.
        compiled: Whether torch.compile is used.
    """
    call: Callable[..., object] = torch.compile(module, dynamic=False) if compiled else module

    def run() -> object:
        with torch.inference_mode():
            return call(**inputs)

    if compiled:
        run()  # the first call compiles, which must not be measured
    return Prepared(run, {"threads": torch.get_num_threads(), "precision": "highest"})


# -- rooflines in PyTorch -----------------------------------------------------------------------


def make_roofline(options: Mapping[str, Any], threads: int) -> Prepared:
    """Return a matrix product or a sum over a buffer that is ready to run.

    Args:
        options: ``gemm``, the sizes [M, K, N] of a product; or ``read``, the number of float32
            elements to sum.
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
