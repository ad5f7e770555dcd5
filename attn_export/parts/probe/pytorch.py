"""PyTorch's `scaled_dot_product_attention`, for graphs of one `Attention` node, as `probe` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import STANDARD
from attn_export.runtimes.protocol import Engine, Facts, PackagedRuntime, Runtime

if TYPE_CHECKING:
    import numpy as np

_SLOTS = ("query", "key", "value", "attn_mask", "past_key", "past_value")
"""The inputs of `Attention`, in order, that this engine supports."""


class _SdpaEngine(Engine):
    """An `Attention` node, computed by the kernel that PyTorch chooses."""

    def __init__(self, graph: Path, threads: int) -> None:
        import torch

        from attn_export.graph.load import load_model

        torch.set_num_threads(threads)
        nodes = load_model(graph).graph.node
        operators = [node.op_type for node in nodes]
        if operators != ["Attention"]:
            raise ValueError(f"PyTorch's function is one node Attention, not {operators}")
        node = nodes[0]
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        unsupported = [
            *(attributes.keys() - {"is_causal"}),
            *filter(None, node.input[len(_SLOTS) :]),
        ]
        if unsupported:
            raise ValueError(f"PyTorch's function has no {unsupported[0]}")
        self._causal = bool(attributes.get("is_causal"))
        self._inputs = dict(zip(_SLOTS, node.input, strict=False))
        self._outputs = list(node.output)

    def _run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the node once, with past keys and values concatenated before the new ones."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        tensors = {
            slot: torch.from_numpy(inputs[name].copy())
            for slot, name in self._inputs.items() if name
        }  # fmt: skip

        def with_past(name: str) -> Any:
            past = tensors.get(f"past_{name}")  # [B, Hkv, P, D]
            return tensors[name] if past is None else torch.cat([past, tensors[name]], dim=2)

        keys, values = with_past("key"), with_past("value")
        with torch.inference_mode():
            output = scaled_dot_product_attention(
                tensors["query"], keys, values, tensors.get("attn_mask"),
                is_causal=self._causal, enable_gqa=True,
            )  # fmt: skip
        outputs = (output, keys, values)
        return {name: x.numpy() for name, x in zip(self._outputs, outputs, strict=False) if name}

    def facts(self) -> Facts:
        """Return the facts: it runs on the CPU."""
        return {"computes in": "torch"}


class PyTorch(PackagedRuntime):
    """The runtime `pytorch`."""

    name = "pytorch"
    packages = ("torch",)
    modules = ("torch",)
    engine = _SdpaEngine
    dialects = frozenset({STANDARD})
    measured = "2.13.0"

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return "" if find_spec("torch") else "torch is not installed"


def runtimes_of(name: str) -> Sequence[Runtime]:  # noqa: ARG001 (the part names it alone)
    """Return the runtime."""
    return [PyTorch()]
