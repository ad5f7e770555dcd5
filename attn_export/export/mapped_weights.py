"""Weights of a module, read from the file of the bundle that they were written to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from attn_export.graph.save import tensor_places

PARTS = "parts"
"""The key of a value's `meta` with the arrays that lie side by side in it."""


def map_weights(module: nn.Module, models: Iterable[ir.Model], file: Path) -> None:
    """Let a module and its graphs read weights from a file that holds the same bytes.

    `file`: A safetensors file with initialisers of the graphs: weights, transposed weights, or
    weights side by side, which are `PARTS` of their values.
    """
    if not file.is_file():
        return
    data, places = np.memmap(file, np.uint8, "c"), tensor_places(file)
    left: dict[int, Tensor] = {x.data_ptr(): x for x in (*module.parameters(), *module.buffers())}
    for value in (v for model in models for v in model.graph.initializers.values()):
        held = value.const_value
        if held is None or value.name not in places:
            continue
        start, size = places[value.name]
        value.const_value = ir.ExternalTensor(
            file.name, start, size, held.dtype,
            name=value.name, shape=ir.Shape(held.shape.numpy()), base_dir=file.parent,
        )  # fmt: skip
        stored, end = torch.from_numpy(data[start : start + size]), 0
        for own in value.meta.pop(PARTS, None) or [held.numpy()]:
            first, end = end, end + own.shape[-1]
            tensor = left.get(own.__array_interface__["data"][0])
            if tensor is None or tensor.numel() != own.size:
                continue
            part = stored.view(tensor.dtype).view(held.shape.numpy())[..., first:end]
            part = part if own.flags.c_contiguous else part.T
            if torch.equal(part, tensor):
                del left[tensor.data_ptr()]
                tensor.data = part
    for tensor in left.values():  # small ones would keep the whole file that they were read from
        tensor.data = tensor.data.clone()
