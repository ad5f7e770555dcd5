"""Tensors that a checkpoint must have for a spec, with their shapes and where these come from."""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

from attn_export.spec import AttentionSpec
from attn_export.weights.layouts import ADDED_KEYS, K_NORM, KV_UP, Q_NORM, QKV, RELATIVE, SINKS
from attn_export.weights.select_layer import CROSS, LayerMatch

OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip
"""The operators of a formula such as ``num_heads * head_dim``, in names of fields."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint must have.

    Attributes:
        ours: Its name in our state dict; "" if it packs several tensors.
    """

    shape: tuple[int, ...]
    why: str
    ours: str


@dataclasses.dataclass(frozen=True, slots=True)
class NamedSizes:
    """Dimensions of a spec, with the names that they have where the spec comes from.

    Attributes:
        keys: The key in config.json of each field that is read from it.
    """

    spec: AttentionSpec
    keys: Mapping[str, str]
    origin: str

    def tensor(self, ours: str, *formulas: str) -> ExpectedTensor:
        """Return the tensor with axes of these sizes."""
        why = re.sub(r"[a-z_]+", self._explained, ", ".join(formulas))
        sizes = tuple(self._size(ast.parse(formula, mode="eval").body) for formula in formulas)
        return ExpectedTensor(sizes, why, ours)

    def _explained(self, field: re.Match[str]) -> str:
        return f"{self.keys.get(field[0], field[0])} {getattr(self.spec, field[0])}"

    def _size(self, node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](self._size(node.left), self._size(node.right))
        return int(
            getattr(self.spec, node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)
        )

    @property
    def value_width(self) -> str:
        """The field that is the width of a value head, which is that of keys unless it is set."""
        is_derived = self.spec.v_head_dim == self.spec.head_dim
        return "head_dim" if is_derived else "v_head_dim"

    def rows(self) -> dict[str, str]:
        """Return the number of rows of each of the projections q, k and v."""
        widths = ("num_heads * head_dim", "num_kv_heads * head_dim")
        return dict(zip(QKV, (*widths, f"num_kv_heads * {self.value_width}"), strict=True))


_ExpectedTensors = dict[str, ExpectedTensor]


def expected_tensors(
    match: LayerMatch, names: Collection[str], sizes: NamedSizes
) -> _ExpectedTensors:
    """Return the tensors that a layer of a checkpoint must have, by their full names."""
    projections = _latent_tensors if sizes.spec.kv_latent_dim else _projection_tensors
    expected = projections(match, sizes) | _feature_tensors(match, sizes)
    expected = {f"{match.prefix}{name}": tensor for name, tensor in expected.items()}
    if sizes.spec.relative_buckets:
        name = relative_bias_name(match, names) or match.prefix + RELATIVE[0]
        expected[name] = sizes.tensor(RELATIVE[1], "relative_buckets", "num_heads")
    return expected


def relative_bias_name(match: LayerMatch, names: Collection[str]) -> str | None:
    """Return the name of T5's relative bias, which may be stored in block 0 for all layers.

    Returns:
        The name, or None if there is no such tensor.
    """
    if match.role == CROSS:
        return None
    candidates = [match.prefix + tail for tail in RELATIVE]
    words = match.prefix.split(".")
    if "block" in words[:-1]:
        words[words.index("block") + 1] = "0"
        candidates.append(".".join(words) + RELATIVE[0])
    return next((name for name in candidates if name in names), None)


def _projection_tensors(match: LayerMatch, sizes: NamedSizes) -> _ExpectedTensors:
    """Return the weights and biases of the four projections, packed or separate."""
    layout, spec, rows = match.layout, sizes.spec, sizes.rows()
    columns = dict.fromkeys(QKV, "embed_dim")
    if spec.cross:
        columns |= {"k": "kdim", "v": "vdim"}
    packed = " + ".join(rows.values())
    if sizes.value_width == "head_dim":
        packed = "(num_heads + 2 * num_kv_heads) * head_dim"
    out, out_bias = layout.out_names
    expected = {}
    if len(layout.weights) == 1:
        expected[layout.weights[0]] = sizes.tensor("", packed, "embed_dim")
    else:
        for side, name in zip(QKV, layout.weights, strict=True):
            expected[name] = sizes.tensor(f"{side}_proj.weight", rows[side], columns[side])
    values = f"num_heads * {sizes.value_width}"
    expected[out] = sizes.tensor("out_proj.weight", "embed_dim", values)
    if len(layout.biases) == 1 and any(map(spec.has_bias, QKV)):
        expected[layout.biases[0]] = sizes.tensor("", packed)
    elif len(layout.biases) > 1:
        for side, name in zip(QKV, layout.biases, strict=True):
            if spec.has_bias(side):
                expected[name] = sizes.tensor(f"{side}_proj.bias", rows[side])
    if spec.has_bias("out"):
        expected[out_bias] = sizes.tensor("out_proj.bias", "embed_dim")
    return expected


LATENT: Final = {
    "kv_a_proj_with_mqa": ("latent.kv_down", "kv_latent_dim + rotary_dim", "embed_dim"),
    "o_proj": ("out_proj", "embed_dim", "num_heads * v_head_dim"),
    "kv_a_layernorm": ("latent.kv_norm", "kv_latent_dim"),
    "kv_b_proj": (KV_UP, "num_heads * (head_dim - rotary_dim + v_head_dim)", "kv_latent_dim"),
}
"""Modules of multi-head latent attention under DeepSeek's names, each with ours and the sizes of
its weight."""
_LATENT_QUERIES: Final = {
    "q_a_proj": ("latent.q_down", "q_latent_dim", "embed_dim"),
    "q_a_layernorm": ("latent.q_norm", "q_latent_dim"),
    "q_b_proj": ("latent.q_up", "num_heads * head_dim", "q_latent_dim"),
}
_PLAIN_QUERIES: Final = {"q_proj": ("latent.q_up", "num_heads * head_dim", "embed_dim")}
_WITH_BIAS: Final = ("kv_a_proj_with_mqa", "o_proj", "q_a_proj")


def _latent_tensors(_: LayerMatch, sizes: NamedSizes) -> _ExpectedTensors:
    """Return the tensors of multi-head latent attention."""
    queries = _LATENT_QUERIES if sizes.spec.q_latent_dim else _PLAIN_QUERIES
    expected = {}
    for name, (ours, rows, *columns) in {**queries, **LATENT}.items():
        weight = ours if ours == KV_UP else f"{ours}.weight"
        expected[f"{name}.weight"] = sizes.tensor(weight, rows, *columns)
        if sizes.spec.bias == "all" and name in _WITH_BIAS:
            expected[f"{name}.bias"] = sizes.tensor(f"{ours}.bias", rows)
    return expected


def _feature_tensors(match: LayerMatch, sizes: NamedSizes) -> _ExpectedTensors:
    spec = sizes.spec
    expected = {}
    if spec.qk_norm != "none":
        parts = 2 if spec.qk_norm == "layer" else 1
        for name in (*Q_NORM[:parts], *K_NORM[:parts]):
            expected[name] = sizes.tensor(name, "head_dim")
    if spec.sinks:
        expected[SINKS] = sizes.tensor(SINKS, "num_heads")
    if spec.add_bias_kv:
        prefix, heads = match.layout.added_keys, spec.num_kv_heads
        for side in ("k", "v"):
            ours = f"bias_{side}"
            flat = sizes.tensor(ADDED_KEYS + ours, sizes.rows()[side])
            (count,) = flat.shape
            shape = (heads, count // heads) if prefix else (1, 1, count)
            expected[prefix + ours] = dataclasses.replace(flat, shape=shape)
    return expected
