"""Property tests of specs and masks: any values are either refused, or survive a round trip."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tried_fields import alone

from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec, fields
from attn_export.spec.rules import MaskSpec

T = TypeVar("T")
hypothesis_rules = settings(deadline=None, derandomize=True, database=None)


@st.composite
def masks(draw: st.DrawFn) -> MaskSpec:
    rank = draw(st.integers(2, 4))
    leading = [draw(st.sampled_from((axis, "1"))) for axis in ("B", "H", "L")[4 - rank :]]
    return MaskSpec(draw(st.sampled_from(("bool", "float"))), (*leading, "S"))


BIASES = st.lists(st.sampled_from(("q", "k", "v", "out")), min_size=1)


BY_HAND = {
    "cross", "causal", "window_right", "rotary", "rotary_scaling", "position_ids", "alibi_falcon",
    "relative_buckets", "packed_qkv",
}  # fmt: skip
"""Features that depend on others."""


def of_row(name: str) -> st.SearchStrategy:
    """Return the values of a field that its row allows."""
    row, kind = fields.FIELDS[name], fields.TYPES[name]
    if row.choices or kind == "bool":
        return st.sampled_from(row.choices or (False, True))
    low, high = row.least or 0, row.most or 0
    whole = st.integers(math.ceil(low), int(min(high, 10**6)))
    values = whole if kind == "int" else st.floats(low, high) | whole
    return values | st.none() if fields.DEFAULTS[name] is None else values


@st.composite
def rotary_values(draw: st.DrawFn, width: int) -> dict[str, object]:
    """Draw rotary fields for heads of `width` channels, at least two."""
    return {
        "rotary": draw(st.sampled_from(("half", "interleaved"))),
        "rotary_dim": 2 * draw(st.integers(1, width // 2)),
        "rotary_theta": draw(st.floats(1.001, 1e30) | st.integers(2, 10**6)),
        "rotary_scaling": draw(st.sampled_from(("none", "linear", "llama3", "yarn"))),
        "rotary_factor": draw(st.floats(1, 1e6) | st.integers(1, 10**6)),
        "rotary_original_len": draw(st.integers(1, 10**6)),
    }


@st.composite
def spec_values(draw: st.DrawFn) -> dict[str, object]:
    """Draw values of a valid spec, some of them left out."""
    kv_heads, sharing, width = draw(st.tuples(*[st.integers(1, 6)] * 3))
    heads = kv_heads * sharing
    given_width = draw(st.booleans())
    size = st.integers(1, 100)
    optional = {
        "v_head_dim": size,
        "bias": st.booleans() | st.sampled_from(("all", "none")) | BIASES | BIASES.map(",".join),
        "scale": st.none() | st.floats(1e-30, 1e30) | size,
        "attn_mask": st.just("none") | masks().map(str),
        "attn_weights": st.booleans(),
        "dropout": st.floats(0, 1, exclude_max=True),
        "norm_eps": of_row("norm_eps"),
    }
    cross = draw(st.booleans())
    features = {name.split(" ")[0] for name in alone()} - BY_HAND - optional.keys()
    optional |= {
        name: of_row(name)
        for name in sorted(features)
        if not (cross and "cross" in fields.FIELDS[name].excludes)
    }
    if cross:
        optional |= {"kdim": size, "vdim": size}
    else:
        optional |= {
            "cache": st.sampled_from(("none", "append", "in-place")),
            "relative_buckets": st.just(0) | st.integers(4, 100),
            "relative_max_distance": st.integers(101, 1000),
        }
        optional |= draw(st.sampled_from((
            {"causal": st.booleans()}, {"window_right": st.none() | st.integers(0, 100)},
        )))  # fmt: skip
    values = {
        "cross": cross,
        "embed_dim": draw(size) if given_width else heads * width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }
    if given_width:
        values["head_dim"] = width
    values |= draw(st.fixed_dictionaries({}, optional=optional))
    if width > 1 and not cross and draw(st.booleans()):
        values |= draw(rotary_values(width))
    return values


@st.composite
def linear_values(draw: st.DrawFn) -> dict[str, object]:
    """Draw values of a valid spec of linear attention, some of them left out."""
    kv_heads, sharing, width = draw(st.tuples(*[st.integers(1, 6)] * 3))
    rows = ("update_rule", "decay", "shared_beta", "v_head_dim", "bias", "qk_norm", "dtype")
    optional = {name: of_row(name) for name in rows if name != "bias"}
    optional |= {"cache": st.sampled_from(("none", "state")), "bias": BIASES.map(",".join)}
    heads = kv_heads * sharing
    values = {"embed_dim": heads * width, "num_heads": heads, "num_kv_heads": kv_heads}
    return values | {"kind": "linear"} | draw(st.fixed_dictionaries({}, optional=optional))


@hypothesis_rules
@given(values=spec_values() | linear_values())
def test_any_spec_survives_toml(values: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = AttentionSpec.from_dict(values)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(spec.to_toml(), encoding="utf-8")
    assert AttentionSpec.from_toml(path) == spec
    assert {key: getattr(spec, key) for key in values if key != "bias"} == {
        key: _canonical(key, value) for key, value in values.items() if key != "bias"
    }


def _canonical(key: str, value: object) -> object:
    return str(MaskSpec.parse(value)) if key == "attn_mask" and value != "none" else value


@hypothesis_rules
@given(some=st.lists(st.sampled_from(("q", "k", "v", "out"))), gap=st.sampled_from(("", " ")))
def test_any_bias_is_the_set_of_its_projections(some: list[str], gap: str) -> None:
    spec = AttentionSpec(embed_dim=32, num_heads=4, bias=some)
    assert {name for name in ("q", "k", "v", "out") if spec.has_bias(name)} == set(some)
    again = spec.bias if not some else f"{gap},{gap}".join(some)
    assert AttentionSpec(embed_dim=32, num_heads=4, bias=again) == spec


def outcome(call: Callable[[], T]) -> T | str:
    """Return the result of a call, or the message of its SpecError."""
    try:
        return call()
    except SpecError as error:
        return str(error)


FIELDS = [field.name for field in dataclasses.fields(AttentionSpec)]
ANYTHING = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text() | st.lists(st.none())
)


@hypothesis_rules
@given(values=st.dictionaries(st.sampled_from(FIELDS) | st.text(), ANYTHING))
def test_any_values_are_a_spec_or_refused_in_one_line(values: dict) -> None:
    spec = outcome(lambda: AttentionSpec.from_dict({"embed_dim": 32, "num_heads": 4} | values))
    if isinstance(spec, str):
        assert len(spec.splitlines()) == 1
    else:
        assert spec.num_kv_heads * spec.q_per_kv == spec.num_heads
        assert spec.rotary == "none" or 2 <= spec.rotary_dim <= spec.head_dim


@hypothesis_rules
@given(mask=masks(), gap=st.sampled_from(("", " ", "\t")))
def test_any_mask_survives_text(mask: MaskSpec, gap: str) -> None:
    assert MaskSpec.parse(str(mask)) == mask
    assert MaskSpec.parse(f"{gap}{mask.dtype}[{f'{gap},{gap}'.join(mask.axes)}{gap}]{gap}") == mask


@hypothesis_rules
@given(text=st.text() | st.from_regex(r"(bool|float)\[[BHLS1, ]*\]", fullmatch=True))
def test_any_text_is_a_mask_or_refused_in_one_line(text: str) -> None:
    mask = outcome(lambda: MaskSpec.parse(text))
    if isinstance(mask, str):
        assert len(mask.splitlines()) == 1
    else:
        assert str(mask) == "".join(text.split())
