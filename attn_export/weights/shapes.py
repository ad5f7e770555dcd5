"""Tensors that a spec expects of a layout, with their shapes and the reasons.

Legend: E embed_dim, H num_heads, Hkv num_kv_heads, D head_dim, Dv v_head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from attn_export.spec import AttentionSpec
from attn_export.weights.layouts import (
    ADDED_KEYS,
    K_NORM,
    KV_UP,
    PARTS,
    Q_NORM,
    RELATIVE,
    SINKS,
)
from attn_export.weights.select_layer import CROSS, LayerMatch


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """A tensor that must be there.

    Attributes:
        shape: Its shape.
        why: The numbers that the shape comes from.
        ours: Its name in our state dict, "" for one that packs several.
    """

    shape: tuple[int, ...]
    why: str
    ours: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a spec, and their names at their source.

    Attributes:
        spec: The attention.
        keys: The key of each field in config.json.
        origin: The source of the numbers.
    """

    spec: AttentionSpec
    keys: Mapping[str, str]
    origin: str

    def of(self, field: str) -> str:
        """Return a field and its value, as in ``num_key_value_heads 4``."""
        return f"{self.keys.get(field, field)} {getattr(self.spec, field)}"

    def q(self) -> tuple[int, str]:
        """Return the rows of the query projection."""
        s = self.spec
        return s.num_heads * s.head_dim, f"{self.of('num_heads')} * {self.of('head_dim')}"

    def k(self) -> tuple[int, str]:
        """Return the rows of the key projection."""
        s = self.spec
        return s.num_kv_heads * s.head_dim, f"{self.of('num_kv_heads')} * {self.of('head_dim')}"

    def v(self) -> tuple[int, str]:
        """Return the rows of the value projection."""
        s = self.spec
        return s.num_kv_heads * s.v_head_dim, f"{self.of('num_kv_heads')} * {self.v_width()}"

    def v_width(self) -> str:
        """Return the text of Dv, which is D unless a spec sets it."""
        is_derived = self.spec.v_head_dim == self.spec.head_dim
        return self.of("head_dim" if is_derived else "v_head_dim")

    def packed(self) -> tuple[int, str]:
        """Return the rows of all three."""
        s = self.spec
        rows = (s.num_heads + s.num_kv_heads) * s.head_dim + s.num_kv_heads * s.v_head_dim
        if s.v_head_dim != s.head_dim:
            return rows, " + ".join(side[1] for side in (self.q(), self.k(), self.v()))
        heads = f"({self.of('num_heads')} + 2 * {self.of('num_kv_heads')})"
        return rows, f"{heads} * {self.of('head_dim')}"


def wanted_tensors(
    found: LayerMatch, names: Collection[str], sizes: Sizes
) -> dict[str, ExpectedTensor]:
    """Return the tensors of a checkpoint that an attention needs, by their full names.

    Args:
        found: The attention.
        names: The tensors of the checkpoint.
        sizes: The spec.
    """
    projections = _of_latents if sizes.spec.kv_latent_dim else _of_projections
    wanted = projections(found, sizes) | _of_features(found, sizes)
    return {f"{found.prefix}{name}": tensor for name, tensor in wanted.items()} | _relative(
        found, names, sizes
    )


def relative_bias_name(found: LayerMatch, names: Collection[str]) -> str | None:
    """Return the name of T5's relative bias, which the first layer holds for all layers.

    Args:
        found: The attention.
        names: The names of all tensors.
    """
    if found.role == CROSS:
        return None
    own = [found.prefix + tail for tail in RELATIVE]
    words = found.prefix.split(".")
    if "block" in words[:-1]:
        words[words.index("block") + 1] = "0"
        own.append(".".join(words) + RELATIVE[0])
    return next((name for name in own if name in names), None)


def _of_projections(found: LayerMatch, sizes: Sizes) -> dict[str, ExpectedTensor]:
    layout, spec, say = found.layout, sizes.spec, sizes.of
    inside = {"q": "embed_dim", "k": "kdim", "v": "vdim"}
    wide = {side: say(field) for side, field in inside.items()}
    if not spec.cross:
        wide = dict.fromkeys(inside, say("embed_dim"))
    rows = {"q": sizes.q(), "k": sizes.k(), "v": sizes.v()}
    wanted = {}
    if len(layout.weights) == 1:
        count, why = sizes.packed()
        shape = (count, spec.embed_dim)
        wanted[layout.weights[0]] = ExpectedTensor(shape, f"{why}, {wide['q']}")
    else:
        for side, name in zip(PARTS, layout.weights, strict=True):
            shape = (rows[side][0], getattr(spec, inside[side]))
            why = f"{rows[side][1]}, {wide[side]}"
            wanted[name] = ExpectedTensor(shape, why, f"{side}_proj.weight")
    shape = (spec.embed_dim, spec.num_heads * spec.v_head_dim)
    why = f"{say('embed_dim')}, {say('num_heads')} * {sizes.v_width()}"
    wanted[layout.out[0]] = ExpectedTensor(shape, why, "out_proj.weight")
    return wanted | _of_biases(found, sizes, rows)


def _of_latents(_: LayerMatch, sizes: Sizes) -> dict[str, ExpectedTensor]:
    """Return the tensors of multi-head latent attention, under DeepSeek's names."""
    s, say = sizes.spec, sizes.of
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
    wanted = {
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
        wanted[f"{name}.weight"] = ExpectedTensor(
            (count, width), f"{why}, {text}", f"{ours}.weight"
        )
        if s.bias == "all":
            wanted[f"{name}.bias"] = ExpectedTensor((count,), why, f"{ours}.bias")
    for name, (count, why, ours) in norms.items():
        wanted[f"{name}.weight"] = ExpectedTensor((count,), why, f"{ours}.weight")
    return wanted


def _of_biases(
    found: LayerMatch, sizes: Sizes, rows: Mapping[str, tuple[int, str]]
) -> dict[str, ExpectedTensor]:
    layout, spec = found.layout, sizes.spec
    wanted = {}
    if len(layout.biases) == 1 and any(map(spec.has_bias, PARTS)):
        count, why = sizes.packed()
        wanted[layout.biases[0]] = ExpectedTensor((count,), why)
    elif len(layout.biases) > 1:
        for side, name in zip(PARTS, layout.biases, strict=True):
            if spec.has_bias(side):
                wanted[name] = ExpectedTensor((rows[side][0],), rows[side][1], f"{side}_proj.bias")
    if spec.has_bias("out"):
        wanted[layout.out[1]] = ExpectedTensor(
            (spec.embed_dim,), sizes.of("embed_dim"), "out_proj.bias"
        )
    return wanted


def _of_features(found: LayerMatch, sizes: Sizes) -> dict[str, ExpectedTensor]:
    spec = sizes.spec
    wanted = {}
    if spec.qk_norm != "none":
        parts = 2 if spec.qk_norm == "layer" else 1
        for name in (*Q_NORM[:parts], *K_NORM[:parts]):
            wanted[name] = ExpectedTensor((spec.head_dim,), sizes.of("head_dim"), name)
    if spec.sinks:
        wanted[SINKS] = ExpectedTensor((spec.num_heads,), sizes.of("num_heads"), SINKS)
    if spec.add_bias_kv:
        place = found.layout.added_keys
        for name, (rows, why) in (("bias_k", sizes.k()), ("bias_v", sizes.v())):
            shape = (spec.num_kv_heads, rows // spec.num_kv_heads) if place else (1, 1, rows)
            wanted[place + name] = ExpectedTensor(shape, why, ADDED_KEYS + name)
    return wanted


def _relative(found: LayerMatch, names: Collection[str], sizes: Sizes) -> dict[str, ExpectedTensor]:
    spec = sizes.spec
    if not spec.relative_buckets:
        return {}
    name = relative_bias_name(found, names) or found.prefix + RELATIVE[0]
    why = f"{sizes.of('relative_buckets')}, {sizes.of('num_heads')}"
    return {name: ExpectedTensor((spec.relative_buckets, spec.num_heads), why, RELATIVE[1])}
