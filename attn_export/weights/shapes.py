"""Tensors that a checkpoint must have for a spec, with their shapes and where these come from.

Legend: E embed_dim, H num_heads, Hkv num_kv_heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from attn_export.spec import AttentionSpec
from attn_export.weights.layouts import ADDED_KEYS, K_NORM, KV_UP, PARTS, Q_NORM, RELATIVE, SINKS
from attn_export.weights.select_layer import CROSS, LayerMatch


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
    ours: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a spec, with the names that they have where the spec comes from.

    Attributes:
        spec: The spec.
        keys: The key in config.json of each field that is read from it.
        origin: The source of the spec in messages, such as ``config.json``.
    """

    spec: AttentionSpec
    keys: Mapping[str, str]
    origin: str

    def show(self, field: str) -> str:
        """Format a field and its value: ``num_key_value_heads 4``."""
        return f"{self.keys.get(field, field)} {getattr(self.spec, field)}"

    def q(self) -> tuple[int, str]:
        """Return the number of rows of the query projection, and the text that explains it."""
        s = self.spec
        return s.num_heads * s.head_dim, f"{self.show('num_heads')} * {self.show('head_dim')}"

    def k(self) -> tuple[int, str]:
        """Return the number of rows of the key projection, and the text that explains it."""
        s = self.spec
        return s.num_kv_heads * s.head_dim, f"{self.show('num_kv_heads')} * {self.show('head_dim')}"

    def v(self) -> tuple[int, str]:
        """Return the number of rows of the value projection, and the text that explains it."""
        s = self.spec
        return s.num_kv_heads * s.v_head_dim, f"{self.show('num_kv_heads')} * {self.v_width()}"

    def v_width(self) -> str:
        """Format Dv, which is D unless the spec sets it."""
        is_derived = self.spec.v_head_dim == self.spec.head_dim
        return self.show("head_dim" if is_derived else "v_head_dim")

    def packed(self) -> tuple[int, str]:
        """Return the number of rows of all three projections, and the text that explains it."""
        s = self.spec
        rows = (s.num_heads + s.num_kv_heads) * s.head_dim + s.num_kv_heads * s.v_head_dim
        if s.v_head_dim != s.head_dim:
            return rows, " + ".join(side[1] for side in (self.q(), self.k(), self.v()))
        heads = f"({self.show('num_heads')} + 2 * {self.show('num_kv_heads')})"
        return rows, f"{heads} * {self.show('head_dim')}"


def expected_tensors(
    match: LayerMatch, names: Collection[str], sizes: Sizes
) -> dict[str, ExpectedTensor]:
    """Return the tensors that a layer of a checkpoint must have, by their full names.

    Args:
        match: The layer.
        names: The names of all tensors of the checkpoint.
        sizes: The spec of the layer.
    """
    projections = _latent_tensors if sizes.spec.kv_latent_dim else _projection_tensors
    expected = projections(match, sizes) | _feature_tensors(match, sizes)
    return {f"{match.prefix}{name}": tensor for name, tensor in expected.items()} | _relative_bias(
        match, names, sizes
    )


def relative_bias_name(match: LayerMatch, names: Collection[str]) -> str | None:
    """Return the name of T5's relative bias, which may be stored in block 0 for all layers.

    Args:
        match: The layer.
        names: The names of all tensors of the checkpoint.

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


def _projection_tensors(match: LayerMatch, sizes: Sizes) -> dict[str, ExpectedTensor]:
    layout, spec, say = match.layout, sizes.spec, sizes.show
    inside = {"q": "embed_dim", "k": "kdim", "v": "vdim"}
    wide = {side: say(field) for side, field in inside.items()}
    if not spec.cross:
        wide = dict.fromkeys(inside, say("embed_dim"))
    rows = {"q": sizes.q(), "k": sizes.k(), "v": sizes.v()}
    expected = {}
    if len(layout.weights) == 1:
        count, why = sizes.packed()
        shape = (count, spec.embed_dim)
        expected[layout.weights[0]] = ExpectedTensor(shape, f"{why}, {wide['q']}")
    else:
        for side, name in zip(PARTS, layout.weights, strict=True):
            shape = (rows[side][0], getattr(spec, inside[side]))
            why = f"{rows[side][1]}, {wide[side]}"
            expected[name] = ExpectedTensor(shape, why, f"{side}_proj.weight")
    shape = (spec.embed_dim, spec.num_heads * spec.v_head_dim)
    why = f"{say('embed_dim')}, {say('num_heads')} * {sizes.v_width()}"
    expected[layout.out[0]] = ExpectedTensor(shape, why, "out_proj.weight")
    return expected | _bias_tensors(match, sizes, rows)


def _latent_tensors(_: LayerMatch, sizes: Sizes) -> dict[str, ExpectedTensor]:
    """Return the tensors of multi-head latent attention, under DeepSeek's names."""
    s, say = sizes.spec, sizes.show
    H, R, C = s.num_heads, s.rotary_dim, s.kv_latent_dim
    wide, latent, turned = say("embed_dim"), say("kv_latent_dim"), say("rotary_dim")
    rows = {
        "q_a_proj": (s.q_latent_dim, say("q_latent_dim"), "latent.q_down"),
        "kv_a_proj_with_mqa": (C + R, f"{latent} + {turned}", "latent.kv_down"),
        "o_proj": (s.embed_dim, wide, "out_proj"),
    }
    columns = {"o_proj": (H * s.v_head_dim, f"{say('num_heads')} * {say('v_head_dim')}")}
    norms = {"kv_a_layernorm": (C, latent, "latent.kv_norm")}
    queries, inputs = "q_b_proj", (s.q_latent_dim, say("q_latent_dim"))
    if s.q_latent_dim:
        norms["q_a_layernorm"] = (s.q_latent_dim, say("q_latent_dim"), "latent.q_norm")
    else:
        del rows["q_a_proj"]
        queries, inputs = "q_proj", (s.embed_dim, wide)
    expected = {
        f"{queries}.weight": ExpectedTensor(
            (H * s.head_dim, inputs[0]),
            f"{say('num_heads')} * {say('head_dim')}, {inputs[1]}", "latent.q_up.weight",
        ),
        "kv_b_proj.weight": ExpectedTensor(
            (H * (s.head_dim - R + s.v_head_dim), C),
            f"{say('num_heads')} * ({say('head_dim')} - {turned} + {say('v_head_dim')}), {latent}",
            KV_UP,
        ),
    }  # fmt: skip
    for name, (count, why, ours) in rows.items():
        width, text = columns.get(name, (s.embed_dim, wide))
        expected[f"{name}.weight"] = ExpectedTensor(
            (count, width), f"{why}, {text}", f"{ours}.weight"
        )
        if s.bias == "all":
            expected[f"{name}.bias"] = ExpectedTensor((count,), why, f"{ours}.bias")
    for name, (count, why, ours) in norms.items():
        expected[f"{name}.weight"] = ExpectedTensor((count,), why, f"{ours}.weight")
    return expected


def _bias_tensors(
    match: LayerMatch, sizes: Sizes, rows: Mapping[str, tuple[int, str]]
) -> dict[str, ExpectedTensor]:
    layout, spec = match.layout, sizes.spec
    expected = {}
    if len(layout.biases) == 1 and any(map(spec.has_bias, PARTS)):
        count, why = sizes.packed()
        expected[layout.biases[0]] = ExpectedTensor((count,), why)
    elif len(layout.biases) > 1:
        for side, name in zip(PARTS, layout.biases, strict=True):
            if spec.has_bias(side):
                expected[name] = ExpectedTensor(
                    (rows[side][0],), rows[side][1], f"{side}_proj.bias"
                )
    if spec.has_bias("out"):
        expected[layout.out[1]] = ExpectedTensor(
            (spec.embed_dim,), sizes.show("embed_dim"), "out_proj.bias"
        )
    return expected


def _feature_tensors(match: LayerMatch, sizes: Sizes) -> dict[str, ExpectedTensor]:
    spec = sizes.spec
    expected = {}
    if spec.qk_norm != "none":
        parts = 2 if spec.qk_norm == "layer" else 1
        for name in (*Q_NORM[:parts], *K_NORM[:parts]):
            expected[name] = ExpectedTensor((spec.head_dim,), sizes.show("head_dim"), name)
    if spec.sinks:
        expected[SINKS] = ExpectedTensor((spec.num_heads,), sizes.show("num_heads"), SINKS)
    if spec.add_bias_kv:
        prefix = match.layout.added_keys
        for name, (rows, why) in (("bias_k", sizes.k()), ("bias_v", sizes.v())):
            shape = (spec.num_kv_heads, rows // spec.num_kv_heads) if prefix else (1, 1, rows)
            expected[prefix + name] = ExpectedTensor(shape, why, ADDED_KEYS + name)
    return expected


def _relative_bias(
    match: LayerMatch, names: Collection[str], sizes: Sizes
) -> dict[str, ExpectedTensor]:
    spec = sizes.spec
    if not spec.relative_buckets:
        return {}
    name = relative_bias_name(match, names) or match.prefix + RELATIVE[0]
    why = f"{sizes.show('relative_buckets')}, {sizes.show('num_heads')}"
    return {name: ExpectedTensor((spec.relative_buckets, spec.num_heads), why, RELATIVE[1])}
