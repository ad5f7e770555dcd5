"""The layer gives what plain numpy gives, and the same in pieces."""

from __future__ import annotations

import numpy as np
import numpy_linear
import pytest
import torch
from linear_specs import LINEAR_SPECS

from attn_export import AttentionSpec, Subject
from attn_export.attention import seeded_attention
from attn_export.errors import ExportError
from attn_export.results import Arrays

EACH = pytest.mark.parametrize("spec", LINEAR_SPECS.values(), ids=LINEAR_SPECS)


def outputs_of(spec: AttentionSpec, inputs: Arrays) -> dict[str, np.ndarray]:
    module = seeded_attention(spec).double()
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    returned = module(**given)
    tensors = returned if isinstance(returned, tuple) else (returned,)
    return {n: t.detach().numpy() for n, t in zip(spec.output_shapes(), tensors, strict=True)}


def drawn(spec: AttentionSpec, B: int, L: int) -> dict[str, np.ndarray]:
    sizes = {"batch": B, "query_len": L}
    rng = np.random.default_rng(B * 100 + L)
    return {
        name: rng.standard_normal([sizes.get(str(axis), axis) for axis in shape])
        for name, shape in spec.input_shapes().items()
    }


@EACH
@pytest.mark.parametrize(("B", "L"), [(2, 5), (1, 1), (3, 70)])
def test_the_layer_is_the_reference(spec: AttentionSpec, B: int, L: int):
    inputs = drawn(spec, B, L)
    parameters = {n: t.double().numpy() for n, t in seeded_attention(spec).state_dict().items()}
    expected = numpy_linear.run(spec, parameters, inputs)
    for name, array in outputs_of(spec, inputs).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-11, atol=1e-12)


@EACH
def test_a_sequence_in_pieces_gives_the_same(spec: AttentionSpec):
    if not spec.has_state:
        return  # it has nothing to go on with
    inputs, rows = drawn(spec, 2, 9), []
    whole, pasts = outputs_of(spec, inputs), {n: x for n, x in inputs.items() if n != "query"}
    for part in np.split(inputs["query"], [1, 5, 6], axis=1):
        given = outputs_of(spec, {"query": part, **pasts})
        rows.append(given["output"])
        pasts = {name: given[name.replace("past", "present")] for name in pasts}
    joined = {"output": np.concatenate(rows, 1)}
    joined |= {name.replace("past", "present"): array for name, array in pasts.items()}
    for name, array in whole.items():
        np.testing.assert_allclose(joined[name], array, rtol=1e-11, atol=1e-12)


@EACH
def test_every_weight_has_a_gradient(spec: AttentionSpec):
    module = seeded_attention(spec)
    inputs = {n: torch.from_numpy(a).float() for n, a in drawn(spec, 2, 4).items()}
    returned = module(**inputs)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    sum(x.square().sum() for x in outputs).backward()
    assert [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_wrong_state_is_refused():
    module = seeded_attention(LINEAR_SPECS["delta"])
    with pytest.raises(ValueError, match="past_state is missing; the inputs of this spec: query"):
        module(torch.zeros(1, 2, 24))
    with pytest.raises(ValueError, match=r"past_state is \[1, 4, 6, 5\], the spec has"):
        module(torch.zeros(1, 2, 24), torch.zeros(1, 4, 6, 5))


def test_without_the_part_the_kind_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attn_export.attention.hooks", lambda _: iter(()))
    with pytest.raises(ExportError, match="needs the part linear_attention, which is missing"):
        Subject.from_spec(LINEAR_SPECS["delta"])
