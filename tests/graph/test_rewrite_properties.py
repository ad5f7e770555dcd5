"""Every rewrite of `lower` is tried on the inputs that could refute it.

- A computed mask is dropped, or becomes `is_causal`. Wrong if it hides or shows a key at some
  length only. Tried: random rules of windows, blocks, products and lengths, at lengths beyond all
  of their numbers, with and without a past.
- `Attention` becomes a kernel, a product, or opset 18. Wrong if a feature of the node is left out.
  Tried: random nodes with heads, widths, masks of each shape and type, causal, past, softcap, scale
  and weights.
- The graph for one query lets it see all keys. Wrong if one is hidden. Tried: the same, one query.
- A cache is written in place. Wrong if rows hold different numbers of keys. Tried: unequal rows.
- Masked rows give 0. Wrong if the guard is left out. Tried: random masks hide whole rows.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from attention_forms import Form, attributes, bound_run, session
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mask_texts import PADDING, parsed
from onnx import numpy_helper

from attn_export.float64.evaluate import Evaluation
from attn_export.graph.lower import DECODE, lower

LENGTH = 260
"""Longer than anything that the rules below change at."""

NUMBERS = (0, 1, 2, 3, 5, 6, 7, 8, 12, 16, 31, 64, 99)

DISTANCE = "distance = Sub (place, keys)"

ATOMS = {
    "window": "{x} = LessOrEqual (distance, {a})",
    "open window": "{x} = Less (distance, {a})",
    "window by a product": "p{x} = Mul (distance, {a}) {x} = LessOrEqual (p{x}, {b})",
    "window by a quotient": "p{x} = Div (distance, {a1}) {x} = LessOrEqual (p{x}, {b})",
    "window by a sum": "p{x} = Sub (distance, {a}) {x} = LessOrEqual (p{x}, {b})",
    "window by a reciprocal": """
        a{x} = Cast <to: int = 1> ({a1}) b{x} = Cast <to: int = 1> ({b})
        r{x} = Reciprocal (a{x}) f{x} = Cast <to: int = 1> (distance)
        p{x} = Mul (f{x}, r{x}) h{x} = Add (b{x}, between) {x} = LessOrEqual (p{x}, h{x})""",
    "window by a square": "p{x} = Mul (distance, distance) {x} = LessOrEqual (p{x}, {a})",
    "blocks": """
        q{x} = Div (place, {a1}) k{x} = Div (keys, {a1}) p{x} = Sub (q{x}, k{x})
        {x} = LessOrEqual (p{x}, {b})""",
    "share of the length": """
        h{x} = Mul (distance, hundred) n{x} = Mul (s, {percent}) {x} = LessOrEqual (h{x}, n{x})""",
    "window by two divisions": """
        p{x} = Div (distance, {a1}) q{x} = Div (p{x}, {b1}) {x} = LessOrEqual (q{x}, {b})""",
    "one of many": "m{x} = Mod (distance, {a1}) {x} = Equal (m{x}, zero)",
    "all but one": "n{x} = Equal (keys, {a}) {x} = Not (n{x})",
    "prefix": "{x} = Less (keys, {a})",
    "suffix": "{x} = GreaterOrEqual (keys, {a})",
    "late queries": "{x} = Less (place, {a})",
    "long sequences": "n{x} = Greater (s, {a}) o{x} = Not (n{x}) {x} = Or (o{x}, {y})",
    "ahead": "n{x} = Neg (distance) {x} = LessOrEqual (n{x}, {a})",
}  # fmt: skip
JOINED = {"and": "And", "or": "Or"}


@st.composite
def rules(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Draw a rule for visible keys: lines that make `mask`, and the numbers in it."""
    numbers: dict[str, int] = {}

    def number(least: int) -> str:
        name = f"c{len(numbers)}"
        numbers[name] = max(draw(st.sampled_from(NUMBERS)), least)
        return name

    lines, made = [DISTANCE], "before"
    for index in range(draw(st.integers(1, 2))):
        atom = ATOMS[draw(st.sampled_from(sorted(ATOMS)))]
        name = f"x{index}"
        values = {
            "a": number(0), "a1": number(1), "b": number(0), "b1": number(1), "x": name,
            "y": made, "percent": number(50),
        }  # fmt: skip
        lines.append(atom.format(**values))
        joined = f"y{index}"
        lines.append(f"{joined} = {JOINED[draw(st.sampled_from(sorted(JOINED)))]} ({made}, {name})")
        made = joined
    lines.append(f"mask = Identity ({made})")
    return "\n".join(lines), numbers


def with_numbers(model: onnx.ModelProto, numbers: dict[str, int]) -> onnx.ModelProto:
    read = {name for node in model.graph.node for name in node.input}
    held: dict[str, np.generic] = {name: np.int64(x) for name, x in numbers.items()}
    held |= {"hundred": np.int64(100), "between": np.float32(0.437)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(x), name) for name, x in held.items() if name in read
    )
    return model


def drawn(model: onnx.ModelProto, B: int, L: int, P: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([B, L, P])
    sizes = {"B": B, "L": L, "P": P, "S": L + P}
    found = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        array = random.standard_normal(shape).astype(np.float32)
        is_bool = value.type.tensor_type.elem_type == onnx.TensorProto.BOOL
        found[value.name] = array > -0.5 if is_bool else array
    return found


def assert_all_forms_give(
    original: onnx.ModelProto,
    dialects: tuple[str, ...],
    inputs: list[dict[str, np.ndarray]],
    query_axis: int = 2,
    tolerance: float = 3e-6,
) -> None:
    """Compare every form of a graph with a float64 run of the original."""
    reference = Evaluation(original)
    wanted = [list(reference.outputs_of(reference.values(one)).values()) for one in inputs]
    for dialect in dialects:
        for form, lowered in lower(ir.from_proto(original), dialect).items():
            engine = session(lowered.model)
            for one, right in zip(inputs, wanted, strict=True):
                if form == DECODE and one["Q"].shape[query_axis] != 1:
                    continue
                for got, expected in zip(bound_run(engine, one, lowered), right, strict=True):
                    np.testing.assert_allclose(
                        got.astype(np.float64), expected.astype(np.float64), tolerance, tolerance,
                        err_msg=f"{dialect} {form}",
                    )  # fmt: skip


WINDOW_OF_6 = (f"{DISTANCE} x = LessOrEqual (distance, c0) mask = And (before, x)", {"c0": 6})
BLOCKS_OF_64 = (
    f"{DISTANCE} {ATOMS['blocks'].format(x='x', a1='c0', b='c1')} mask = And (before, x)",
    {"c0": 64, "c1": 2},
)


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(rules(), st.booleans())
@example(WINDOW_OF_6, False)
@example(BLOCKS_OF_64, True)
def test_a_rule_for_keys_is_never_taken_for_another(rule: tuple[str, dict], padding: bool):
    text, numbers = rule
    if padding:
        text = text.replace("mask = Identity (", "all = And (padding, ") + " mask = Identity (all)"
        text = text.replace("mask = And (before, x)", "z = And (before, x) all = And (padding, z)")
    model = with_numbers(parsed(text, given=PADDING if padding else ""), numbers)
    sizes = ((1, 2, LENGTH), (1, 1, LENGTH), (2, 9, 5), (1, 70, 70), (1, LENGTH, 0))
    assert_all_forms_give(model, ("ort",), [drawn(model, *each) for each in sizes])


MASKS: tuple[tuple[str | int, ...], ...] = (
    (), (), ("L", "S"), (1, "S"), ("S",), ("B", 1, 1, "S"), ("B", 1, "L", "S"),
    ("B", "H", "L", "S"), (1, "H", 1, "S"), (1, "L", "S"),
)  # fmt: skip


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Draw an `Attention` node with any of its features."""
    Hkv, shared = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 1, 2, 4)))
    heads = (Hkv * shared, Hkv)
    cache = draw(st.sampled_from(("none", "past", "in place")))
    width = draw(st.sampled_from((1, 3, 8, 16)))
    mask = tuple(heads[0] if axis == "H" else axis for axis in draw(st.sampled_from(MASKS)))
    own_keys = cache == "in place" or draw(st.booleans())
    options: dict[str, float] = {}
    # Without as many new keys as queries, runtimes do not agree where a causal mask begins.
    if own_keys and draw(st.booleans()):
        options["is_causal"] = 1
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from((0.3, 1.0, 2.0)))
    if draw(st.integers(0, 3)) == 0:
        options["softcap"] = draw(st.sampled_from((0.7, 5.0)))
    scores = cache != "in place" and draw(st.integers(0, 3)) == 0
    if scores:
        options["qk_matmul_output_mode"] = 3
    return Form(
        heads=heads,
        packed=draw(st.booleans()) and cache != "in place",
        mask=mask,
        mask_type=draw(st.sampled_from(("bool", "float"))),
        past=cache == "past",
        in_place=cache == "in place",
        own_keys=own_keys,
        widths=(width, width if draw(st.booleans()) else draw(st.sampled_from((1, 6)))),
        outputs=4 if scores else 3 if cache != "none" else 1,
        attributes=attributes(**options),
    )


SIZES = (
    (2, 3, 4, 2), (1, 1, 1, 0), (3, 5, 5, 1), (2, 1, 6, 7), (3, 1, 1, 9), (1, 17, 17, 16),
    (2, 9, 33, 0),
)  # fmt: skip
"""B, L, new keys, past."""


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(forms())
def test_any_attention_node_means_the_same_in_every_dialect(form: Form):
    model = form.model()
    inputs = [form.draw(*sizes) for sizes in SIZES]
    query_axis = 1 if form.packed else 2
    assert_all_forms_give(model, ("portable", "ort"), inputs, query_axis, tolerance=2e-5)


def test_a_rule_of_numbers_that_cannot_be_tried_stays():
    model = with_numbers(parsed(WINDOW_OF_6[0], past=False), {"c0": 5000})
    nodes = {node.op_type for node in lower(ir.from_proto(model), "ort")[""].model.graph}
    assert "LessOrEqual" in nodes
    assert not nodes & {"GroupQueryAttention", "MultiHeadAttention"}
