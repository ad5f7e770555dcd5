"""Whatever the values: a spec or a mask is right and survives being written, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec, MaskSpec

T = TypeVar("T")
hypothesis_rules = settings(deadline=None, derandomize=True, database=None)


@st.composite
def masks(draw: st.DrawFn) -> MaskSpec:
    rank = draw(st.integers(2, 4))
    leading = [draw(st.sampled_from((axis, "1"))) for axis in ("B", "H", "L")[4 - rank :]]
    return MaskSpec(draw(st.sampled_from(("bool", "float"))), (*leading, "S"))


@st.composite
def spec_values(draw: st.DrawFn) -> dict[str, object]:
    """Values of a spec that is allowed, some of them left out."""
    kv_heads, sharing, width = draw(st.tuples(*[st.integers(1, 6)] * 3))
    heads = kv_heads * sharing
    given_width = draw(st.booleans())
    size = st.integers(1, 100)
    optional = {
        "v_head_dim": size,
        "bias": st.booleans(),
        "scale": st.none() | st.floats(0, exclude_min=True, allow_infinity=False) | size,
        "attn_mask": st.just("none") | masks().map(str),
        "attn_weights": st.booleans(),
        "dropout": st.floats(0, 1, exclude_max=True),
        "dtype": st.just("float32"),
    }
    cross = draw(st.booleans())
    if cross:
        optional |= {"kdim": size, "vdim": size}
    else:
        optional |= {"causal": st.booleans(), "cache": st.sampled_from(("none", "append"))}
    values = {
        "cross": cross,
        "embed_dim": draw(size) if given_width else heads * width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
    }
    if given_width:
        values["head_dim"] = width
    return values | draw(st.fixed_dictionaries({}, optional=optional))


@hypothesis_rules
@given(values=spec_values())
def test_any_spec_survives_toml(values: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = AttentionSpec.from_dict(values)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(spec.to_toml(), encoding="utf-8")
    assert AttentionSpec.from_toml(path) == spec


def outcome(call: Callable[[], T]) -> T | str:
    """What a call returns, or the message of its SpecError."""
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
