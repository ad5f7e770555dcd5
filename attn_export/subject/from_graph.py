"""The weights of a layer of ours, out of a graph that was exported from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from attn_export.errors import BundleError, one_line
from attn_export.graph.load import load_graph
from attn_export.subject.tensors import to_torch


def weights_of_graph(path: Path, module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module from the initializers of its graph.

    Args:
        path: The graph in the standard dialect. Its initializers have the names of the module's
            parameters and buffers; the weights of linear layers are stored ``[in, out]``.
        module: The module, with any weights.

    Raises:
        GraphError: If the graph cannot be read.
        BundleError: If a weight is missing or has another shape or dtype.
    """
    initializers = load_graph(path).graph.initializers
    linear = {f"{n}.weight" for n, part in module.named_modules() if isinstance(part, nn.Linear)}
    found = {}
    for name, wanted in module.state_dict().items():
        value = initializers.get(name)
        if value is None or value.const_value is None:
            raise BundleError(f"{path} has no weight {name}, which its spec asks for")
        array = _array(path, name, value.const_value)
        (tensor,) = to_torch({name: array.T if name in linear else array}).values()
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise BundleError(
                f"{path}: the weight {name} is {list(tensor.shape)} {tensor.dtype}, and its spec "
                f"asks for {list(wanted.shape)} {wanted.dtype}"
            )
        found[name] = tensor
    return found


def _array(path: Path, name: str, tensor: Any) -> np.ndarray:
    try:
        return np.array(tensor.numpy())
    except Exception as error:  # of external data that is missing or too short
        raise BundleError(f"{path}: the weight {name} cannot be read: {one_line(error)}") from error
