"""Tensors that a checkpoint must have for a spec, with their shapes and where these come from.

Legend: E embed_dim, H num_heads, Hkv num_kv_heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from attn_export.spec import AttentionSpec
from attn_export.weights.layouts import ADDED_KEYS, K_NORM, KV_UP, Q_NORM, QKV, RELATIVE, SINKS
from attn_export.weights.select_layer import CROSS, LayerMatch


@dataclasses.dataclass(frozen=True, slots=True)
class ExplainedSize:
    """Size of an axis, and the text that explains it: ``num_heads 8 * head_dim 64``."""

    count: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that a checkpoint must have.

    Attributes:
        shape: Its shape.
        why: The fields and values that determine the shape, for messages.
        ours: Its name in our state dict; "" if it packs several tensors.
    """

    shape: tuple[int, ...]
    why: str
    ours: str


def _tensor(ours: str, *sizes: ExplainedSize) -> ExpectedTensor:
    """Return the expected tensor with axes of these sizes."""
    shape = tuple(size.count for size in sizes)
    return ExpectedTensor(shape, ", ".join(size.text for size in sizes), ours)


@dataclasses.dataclass(frozen=True, slots=True)
class NamedSizes:
    """Dimensions of a spec, with the names that they have where the spec comes from.

    Attributes:
        keys: The key in config.json of each field that is read from it.
        origin: The source of the spec in messages, such as ``config.json``.
    """

    spec: AttentionSpec
    keys: Mapping[str, str]
    origin: str

    def of(self, *fields: str) -> ExplainedSize:
        """Return the value of a field of the spec, or the product of several."""
        values = [getattr(self.spec, field) for field in fields]
        names = [self.keys.get(field, field) for field in fields]
        texts = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
        return ExplainedSize(math.prod(values), " * ".join(texts))

    @property
    def value_width(self) -> str:
        """The field that is Dv, which is D unless the spec sets it."""
        is_derived = self.spec.v_head_dim == self.spec.head_dim
        return "head_dim" if is_derived else "v_head_dim"

    def rows(self) -> dict[str, ExplainedSize]:
        """Return the numbers of rows of the projections q, k and v."""
        return {
            "q": self.of("num_heads", "head_dim"), "k": self.of("num_kv_heads", "head_dim"),
            "v": self.of("num_kv_heads", self.value_width),
        }  # fmt: skip

    def packed(self) -> ExplainedSize:
        """Return the number of rows of all three projections together."""
        rows = self.rows().values()
        text = " + ".join(size.text for size in rows)
        if self.value_width == "head_dim":
            heads = f"({self.of('num_heads').text} + 2 * {self.of('num_kv_heads').text})"
            text = f"{heads} * {self.of('head_dim').text}"
        return ExplainedSize(sum(size.count for size in rows), text)


def expected_tensors(
    match: LayerMatch, names: Collection[str], sizes: NamedSizes
) -> dict[str, ExpectedTensor]:
    """Return the tensors that a layer of a checkpoint must have, by their full names."""
    projections = _latent_tensors if sizes.spec.kv_latent_dim else _projection_tensors
    expected = projections(match, sizes) | _feature_tensors(match, sizes)
    return {f"{match.prefix}{name}": tensor for name, tensor in expected.items()} | _relative_bias(
        match, names, sizes
    )


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


def _projection_tensors(match: LayerMatch, sizes: NamedSizes) -> dict[str, ExpectedTensor]:
    """Return the weights and biases of the four projections, packed or separate."""
    layout, spec, width = match.layout, sizes.spec, sizes.of("embed_dim")
    rows, columns = sizes.rows(), dict.fromkeys(QKV, width)
    if spec.cross:
        columns |= {"k": sizes.of("kdim"), "v": sizes.of("vdim")}
    expected = {}
    if len(layout.weights) == 1:
        expected[layout.weights[0]] = _tensor("", sizes.packed(), width)
    else:
        for side, name in zip(QKV, layout.weights, strict=True):
            expected[name] = _tensor(f"{side}_proj.weight", rows[side], columns[side])
    values = sizes.of("num_heads", sizes.value_width)
    expected[layout.out_names[0]] = _tensor("out_proj.weight", width, values)
    if len(layout.biases) == 1 and any(map(spec.has_bias, QKV)):
        expected[layout.biases[0]] = _tensor("", sizes.packed())
    elif len(layout.biases) > 1:
        for side, name in zip(QKV, layout.biases, strict=True):
            if spec.has_bias(side):
                expected[name] = _tensor(f"{side}_proj.bias", rows[side])
    if spec.has_bias("out"):
        expected[layout.out_names[1]] = _tensor("out_proj.bias", width)
    return expected


def _latent_tensors(_: LayerMatch, sizes: NamedSizes) -> dict[str, ExpectedTensor]:
    """Return the tensors of multi-head latent attention, under DeepSeek's names."""
    spec, width = sizes.spec, sizes.of("embed_dim")
    heads, head, value = (sizes.of(name) for name in ("num_heads", "head_dim", "v_head_dim"))
    latent, query_latent = sizes.of("kv_latent_dim"), sizes.of("q_latent_dim")
    rotated = sizes.of("rotary_dim")
    down = ExplainedSize(latent.count + rotated.count, f"{latent.text} + {rotated.text}")
    up = ExplainedSize(
        heads.count * (head.count - rotated.count + value.count),
        f"{heads.text} * ({head.text} - {rotated.text} + {value.text})",
    )
    queries = sizes.of("num_heads", "head_dim")
    linear = {
        "kv_a_proj_with_mqa": ("latent.kv_down", down, width),
        "o_proj": ("out_proj", width, sizes.of("num_heads", "v_head_dim")),
    }
    norms = {"kv_a_layernorm": ("latent.kv_norm", latent)}
    if spec.q_latent_dim:
        expected = {"q_b_proj.weight": _tensor("latent.q_up.weight", queries, query_latent)}
        linear = {"q_a_proj": ("latent.q_down", query_latent, width), **linear}
        norms["q_a_layernorm"] = ("latent.q_norm", query_latent)
    else:
        expected = {"q_proj.weight": _tensor("latent.q_up.weight", queries, width)}
    expected["kv_b_proj.weight"] = _tensor(KV_UP, up, latent)
    for name, (ours, rows, columns) in linear.items():
        expected[f"{name}.weight"] = _tensor(f"{ours}.weight", rows, columns)
        if spec.bias == "all":
            expected[f"{name}.bias"] = _tensor(f"{ours}.bias", rows)
    for name, (ours, size) in norms.items():
        expected[f"{name}.weight"] = _tensor(f"{ours}.weight", size)
    return expected


def _feature_tensors(match: LayerMatch, sizes: NamedSizes) -> dict[str, ExpectedTensor]:
    spec = sizes.spec
    expected = {}
    if spec.qk_norm != "none":
        parts = 2 if spec.qk_norm == "layer" else 1
        for name in (*Q_NORM[:parts], *K_NORM[:parts]):
            expected[name] = _tensor(name, sizes.of("head_dim"))
    if spec.sinks:
        expected[SINKS] = _tensor(SINKS, sizes.of("num_heads"))
    if spec.add_bias_kv:
        prefix, heads = match.layout.added_keys, spec.num_kv_heads
        for name, side in (("bias_k", "k"), ("bias_v", "v")):
            rows = sizes.rows()[side]
            shape = (heads, rows.count // heads) if prefix else (1, 1, rows.count)
            expected[prefix + name] = ExpectedTensor(shape, rows.text, ADDED_KEYS + name)
    return expected


def _relative_bias(
    match: LayerMatch, names: Collection[str], sizes: NamedSizes
) -> dict[str, ExpectedTensor]:
    if not sizes.spec.relative_buckets:
        return {}
    name = relative_bias_name(match, names) or match.prefix + RELATIVE[0]
    return {name: _tensor(RELATIVE[1], sizes.of("relative_buckets"), sizes.of("num_heads"))}
