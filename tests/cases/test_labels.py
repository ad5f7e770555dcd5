"""Labels of stored cases: honest ones are accepted, and each must be what the inputs show."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
from conftest import interface_of, small_spec

from attn_export.cases.draw import Interface
from attn_export.cases.input_patterns import FUTURE, VALUES
from attn_export.cases.mask_patterns import LENGTHS, LOWEST, MASKS
from attn_export.cases.plan import plan_cases
from attn_export.errors import BundleError
from attn_export.interface import Input
from attn_export.judge.golden_index_check import LABELS, check_labels
from attn_export.results import Case, Golden
from attn_export.schema import InputSignature, Manifest, TensorSignature
from attn_export.tensorfile import ArrayDict

USERS = Interface(
    {
        "x": Input(("batch", "tokens", 8)),
        "padding": Input(("batch", "tokens"), "bool", first=False),
        "bias": Input(("batch", 1, "tokens", "tokens"), hides=True),
    },
    {"y": ("batch", "tokens", 8)},
)
INTERFACES = {
    "append": interface_of(small_spec()),
    "in place": interface_of(small_spec(cache="in-place", attn_mask="float[1,S]")),
    "float16": interface_of(small_spec(dtype="float16", cache="none", attn_mask="float[B,H,L,S]")),
    "users": USERS,
}


@functools.cache
def goldens_of(name: str) -> tuple[Golden, ...]:
    reference = {"output": np.ones(1)}
    return tuple(Golden(case, reference, {}, {}, {}) for case in plan_cases(INTERFACES[name]).cases)


def check(name: str, goldens: list[Golden]) -> None:
    interface = INTERFACES[name]
    inputs = {n: InputSignature(i.dtype, i.shape) for n, i in interface.inputs.items()}
    outputs = {n: TensorSignature("float32", s) for n, s in interface.output_shapes.items()}
    manifest = Manifest("", "", {}, {}, inputs, outputs, "", {}, "")
    check_labels(manifest, goldens, ours=interface.traits.is_attention, batch="batch")


def changed(name: str, applies: Callable[[Case], bool], change: Callable[[ArrayDict], object]):
    """Return the cases of an interface with changed inputs where the change applies."""
    goldens = list(goldens_of(name))
    for number, golden in enumerate(goldens):
        if applies(golden.case):
            inputs = {key: array.copy() for key, array in golden.case.inputs.items()}
            change(inputs)
            case = dataclasses.replace(golden.case, inputs=inputs)
            goldens[number] = dataclasses.replace(golden, case=case)
    return goldens


@pytest.mark.parametrize("name", INTERFACES)
def test_the_cases_of_a_plan_are_what_their_labels_say(name: str):
    check(name, list(goldens_of(name)))


def test_every_content_has_a_check():
    contents = (*VALUES, *MASKS, *LENGTHS, FUTURE, LOWEST)
    assert {content.name for content in contents} <= LABELS.keys()


def fill(name: str, value: object) -> Callable[[ArrayDict], None]:
    def change(inputs: ArrayDict) -> None:
        inputs[name][...] = value

    return change


def has(label: str) -> Callable[[Case], bool]:
    return lambda case: label in case.contents


def is_plain(case: Case) -> bool:
    return case.kind == "shape" and not case.contents


def shrink(inputs: ArrayDict) -> None:
    inputs["query"][...] *= np.float32(0.01)


def draw_again(inputs: ArrayDict) -> None:
    for name in ("query", "x"):
        if name in inputs:
            shape = inputs[name].shape
            inputs[name][...] = np.random.default_rng(0).standard_normal(shape)


OPEN, HIDDEN = fill("attn_mask", True), fill("attn_mask", False)
FORGED = {
    **{label: ("append", has(label), OPEN, f"is said to have {label}") for label in (
        "fully_masked_rows", "all_keys_masked", "one_visible_key", "left_padding", "right_padding",
    )},
    **{label: ("append", has(label), draw_again, f"is said to have {label}") for label in (
        "large_logits", "small_inputs", "sharp", "tiny_values", "outliers", "equal_tokens",
        "one_hot_rows", "causal_future",
    )},
    **{f"{label} of a user": ("users", has(label), draw_again, f"is said to have {label}")
       for label in ("large_logits", "small_inputs", "tiny_values", "outliers", "equal_tokens")},
    "padding of a user": ("users", has("left_padding"), lambda inputs: (
        fill("padding", True)(inputs), fill("bias", 0.0)(inputs)), "is said to have left_padding"),
    "all visible": ("append", has("nothing_masked"), HIDDEN, "is said to have nothing_masked"),
    "lowest": ("float16", has("lowest_float"), fill("attn_mask", 0), "to have lowest_float"),
    "lengths": ("in place", has("beyond_length"), fill("past_length", 9), "to have beyond_length"),
    "full": ("in place", has("empty_and_full"), fill("past_length", 0), "to have empty_and_full"),
    "open masks": ("append", is_plain, OPEN, "is said to have a random mask"),
    "small inputs": ("append", is_plain, shrink, "is said to have random inputs"),
    "nothing": ("append", is_plain, fill("query", 0), "is said to have random inputs"),
    "no change": ("append", lambda case: case.name in ("base", "changed_query"),
                  fill("query", 1), "changed_query has the same query as base"),
    "NaN": ("append", lambda case: case.name == "base", fill("query", np.nan),
            "base has NaN or Inf in batch element 0, and does not say so"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_label_that_the_inputs_do_not_show_is_refused(name: str):
    of, applies, change, message = FORGED[name]
    with pytest.raises(BundleError, match=r"^the stored test cases prove nothing: ") as caught:
        check(of, changed(of, applies, change))
    assert message in str(caught.value)


def relabelled(applies: Callable[[Case], bool], **fields: object) -> list[Golden]:
    """Return cases with other labels, on the same inputs."""
    return [
        dataclasses.replace(golden, case=dataclasses.replace(golden.case, **fields))
        if applies(golden.case)
        else golden
        for golden in goldens_of("append")
    ]


def without_label(label: str) -> list[Golden]:
    return [
        dataclasses.replace(g, case=dataclasses.replace(g.case, contents=tuple(
            each for each in g.case.contents if each != label
        )))
        for g in goldens_of("append")
    ]  # fmt: skip


def plain_and_open(**fields: object) -> list[Golden]:
    """Return cases with open masks and small inputs, which other fields are to excuse."""
    goldens = changed("append", is_plain, lambda inputs: (OPEN(inputs), shrink(inputs)))
    return [
        dataclasses.replace(g, case=dataclasses.replace(g.case, **fields))
        if is_plain(g.case)
        else g
        for g in goldens
    ]


@pytest.mark.parametrize(
    ("forged", "message"),
    [
        (relabelled(lambda case: case.sizes["batch"] == 3, ignored_rows=(0, 1, 2)),
         "whose inputs are finite"),
        (relabelled(lambda case: case.name == "base", ignored_rows=(1,)),
         "base ignores batch element 1, whose inputs are finite"),
        (relabelled(lambda case: bool(case.ignored_rows), ignored_rows=()),
         "has NaN or Inf in batch element"),
        (relabelled(lambda case: case.name == "base", sizes={
            "batch": 1, "query_len": 1, "past_len": 0, "total_len": 1}), "base has sizes"),
        (without_label("left_padding"), "no case with two keys has left_padding"),
        (plain_and_open(kind="probe"), "is said to have random inputs"),
        (plain_and_open(contents=("tried before",)), "is said to have random inputs"),
        (plain_and_open(about="random; inputs times 0.01"), "is said to have random inputs"),
        ([dataclasses.replace(g, expected={"output": np.full(2, np.nan)})
          for g in goldens_of("append")], "has no finite number in its reference"),
    ],
)  # fmt: skip
def test_a_label_that_other_inputs_would_need_is_refused(forged: list[Golden], message: str):
    with pytest.raises(BundleError) as caught:
        check("append", forged)
    assert message in str(caught.value)


def test_batch_elements_that_are_all_nan_are_not_compared():
    def is_nan(case: Case) -> bool:
        return case.name == "nan_in_rows"

    def fill_all(inputs: ArrayDict) -> None:
        for name in ("query", "past_key", "past_value"):
            inputs[name][...] = np.nan

    goldens = changed("append", is_nan, fill_all)
    rows = tuple(range(goldens[0].case.sizes["batch"]))
    rows = next(tuple(range(g.case.sizes["batch"])) for g in goldens if is_nan(g.case))
    forged = [
        dataclasses.replace(g, case=dataclasses.replace(g.case, ignored_rows=rows))
        if is_nan(g.case)
        else g
        for g in goldens
    ]
    with pytest.raises(BundleError, match="nan_in_rows ignores all batch elements"):
        check("append", forged)


# -- padding, and what is stored of a whole model: rows of ignored batch elements are compared -----

FIRST, LAST = (0, 3, 6), (2, 5, 8)
"""The numbers of the rows at the first and at the last of 3 positions, in 3 batch elements."""


@pytest.mark.parametrize("batch", ["batch", "a name that no input has"])
@pytest.mark.parametrize(
    ("determined", "wrong"),
    [
        ({"y": LAST, "z": LAST}, ""),
        ({"y": LAST, "z": (*FIRST, 8)}, ""),
        ({"z": LAST}, "base ignores batch element 0, whose inputs are finite"),
        ({"y": LAST[:2], "z": LAST}, "base ignores batch element 2, whose inputs are finite"),
        ({"y": FIRST, "z": LAST}, "base compares no row at the last position of y"),
    ],
)
def test_rows_of_each_output_are_compared_in_every_batch_element(
    determined: dict[str, tuple[int, ...]], wrong: str, batch: str
):
    shape = ("batch", "tokens", 8)
    ends = ({"x": InputSignature("float32", shape)},
            dict.fromkeys(("y", "z"), TensorSignature("float32", shape)))  # fmt: skip
    values = np.random.default_rng(0).standard_normal((3, 3, 8), np.float32)
    case = Case("base", "probe", {"batch": 3, "tokens": 3}, {"x": values}, "",
                ignored_rows=(0, 1, 2))  # fmt: skip
    golden = Golden(case, {"y": values, "z": values}, {}, {}, {}, determined=determined)
    manifest = Manifest("", "", {}, {}, *ends, "", {}, "")
    with pytest.raises(BundleError, match=wrong) if wrong else contextlib.nullcontext():
        check_labels(manifest, [golden], ours=False, batch=batch)


def test_an_input_of_a_module_that_is_called_past_length_is_one_like_others():
    visible = np.array([[True, False, False, True]] * 2)
    inputs = {"past_length": np.array([1, 2]), "mask": visible}
    shapes = {"past_length": ("batch",), "mask": ("batch", "keys")}
    ends = ({n: InputSignature(a.dtype.name, shapes[n]) for n, a in inputs.items()},
            {"y": TensorSignature("float32", ("batch",))})  # fmt: skip
    case = Case("base", "probe", {"batch": 2, "keys": 4}, inputs, "", contents=("right_padding",))
    golden = Golden(case, {"y": np.ones(2, np.float32)}, {}, {}, {})
    manifest = Manifest("", "", {}, {}, *ends, "", {}, "")
    # Beyond the length of a cache in place all keys may be visible again.
    with pytest.raises(BundleError, match="is said to have right_padding, and its inputs have not"):
        check_labels(manifest, [golden], ours=False, batch="batch")
