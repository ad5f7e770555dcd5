"""PyTorch's `scaled_dot_product_attention`: graphs of one node Attention, as probes have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_export.dialect_names import STANDARD
from attn_export.runtimes.protocol import Engine, Facts, Unsupported, installed_version

if TYPE_CHECKING:
    import numpy as np
    import onnx

SLOTS = ("query", "key", "value", "attn_mask", "past_key", "past_value")
"""The inputs of Attention that PyTorch's function has, too, or that are put before its keys."""


class PyTorch:
    """`pytorch`."""

    name = "pytorch"
    device = "cpu"
    dialects = frozenset({STANDARD})
    measured = "2.13.0"
    unsupported: Sequence[Unsupported] = ()

    def version(self) -> str | None:
        """Return the version of torch."""
        return installed_version("torch")

    def unavailable(self) -> str:
        """Return the reason that it cannot run here."""
        return "" if find_spec("torch") else "torch is not installed"

    def prepare(self) -> None:
        """Import torch."""
        import torch  # noqa: F401

    def load(self, graph: Path, threads: int) -> Engine:
        """Load the graph.

        Args:
            graph: The file of the graph.
            threads: The number of threads.

        Raises:
            ValueError: If the graph is not one node that the function can stand for.
        """
        import torch

        from attn_export.graph.load import load_model

        torch.set_num_threads(threads)
        return SdpaEngine(load_model(graph).graph)


class SdpaEngine(Engine):
    """A node Attention, run by the kernel that PyTorch chooses."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        operators = [node.op_type for node in graph.node]
        if operators != ["Attention"]:
            raise ValueError(f"PyTorch's function is one node Attention, not {operators}")
        node = graph.node[0]
        attributes = {each.name: each.i for each in node.attribute}
        others = [*(attributes.keys() - {"is_causal"}), *filter(None, node.input[len(SLOTS) :])]
        if others:
            raise ValueError(f"PyTorch's function has no {others[0]}")
        self._causal = bool(attributes.get("is_causal"))
        self._inputs = dict(zip(SLOTS, node.input, strict=False))
        self._outputs = list(node.output)

    def run(
        self,
        inputs: Mapping[str, np.ndarray],
        bound: Mapping[str, str],  # noqa: ARG002 (torch gives new arrays)
    ) -> dict[str, np.ndarray]:
        """Run once. Past keys are put before the new ones, as in every layer with a cache.

        Args:
            inputs: The inputs, by name.
            bound: Names of outputs that share the buffer of an input, with that input.
        """
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        given = {
            slot: torch.from_numpy(inputs[name].copy())
            for slot, name in self._inputs.items() if name
        }  # fmt: skip

        def whole(name: str) -> Any:
            past = given.get(f"past_{name}")
            return given[name] if past is None else torch.cat([past, given[name]], dim=2)

        keys, values = whole("key"), whole("value")
        with torch.inference_mode():
            output = scaled_dot_product_attention(
                given["query"], keys, values, given.get("attn_mask"),
                is_causal=self._causal, enable_gqa=True,
            )  # fmt: skip
        found = (output, keys, values)
        return {name: x.numpy() for name, x in zip(self._outputs, found, strict=False) if name}

    def facts(self) -> Facts:
        """Return the facts: it runs on the CPU."""
        return {"computes in": "torch"}
