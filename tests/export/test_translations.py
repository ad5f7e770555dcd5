"""Operations for which the exporter has no ONNX form: ours give the numbers of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from conftest import small_spec
from torch import Tensor, nn
from torch.export import Dim

from attn_export.export import export as exporter
from attn_export.export.subject import Subject
from attn_export.export.translations import (
    ON_PAIRS,
    decompose_complex,
    grouped_product,
    translations,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export, as a build ignores them


class Turned(nn.Module):
    """Rotation of pairs `[B, L, 2n]` by a table that is made in each call."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        table = self.change(torch.polar(torch.ones_like(angles), angles))
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * table).flatten(2)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "an axis before": lambda t: t[None],
    "an axis from the end": lambda t: t.unsqueeze(-1)[..., 0],
    "expanded": lambda t: t[None].expand(1, -1, -1),
    "the last of it": lambda t: t[-1],
    "chosen by numbers": lambda t: t[torch.arange(t.shape[0]).flip(0)],
    "an exponential": lambda t: torch.exp(t),
    "times i": lambda t: 1j * t,
    "times a number": lambda t: t * 0.5,
    "of real numbers": lambda t: torch.exp(1j * t.real),
}


@pytest.mark.parametrize("name", CHANGES)
def test_complex_numbers_are_taken_apart_into_pairs(name: str):
    module, x = Turned(CHANGES[name]), torch.randn(2, 5, 8)
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}}
    program = decompose_complex(torch.export.export(module, (x,), dynamic_shapes=shapes))
    torch.testing.assert_close(program.module()(x), module(x))
    left = [
        node for node in program.graph.nodes
        if node.target in ON_PAIRS and node.meta["val"].is_complex()
        and "mul.Tensor" not in str(node.target)
    ]  # fmt: skip
    assert not left


def test_a_program_without_complex_numbers_stays_as_it_is():
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(2, 2),))
    assert decompose_complex(program) is program


@pytest.mark.parametrize("ends", [[2, 2, 5], [0, 5, 5], [5, 5, 5], [1, 3, 5]])
def test_rows_meet_the_matrix_of_their_group(ends: list[int]):
    rng = np.random.default_rng(0)
    x, weights = (rng.standard_normal(s).astype(np.float32) for s in ((5, 4), (3, 4, 6)))
    found = grouped_product(x, weights, np.array(ends, np.int32))
    group = np.searchsorted(ends, np.arange(5), side="right")
    wanted = np.einsum("nk,nkm->nm", x, weights[group])
    np.testing.assert_allclose(found.value, wanted, rtol=1e-5, atol=1e-6)


IN_PLACE = {"cache": "in-place", "attn_mask": "none"}

KEPT = {
    "a mask": {},
    "everything of one projection": {"packed_qkv": True, "softcap": 30.0, "qk_norm": "rms"},
    "layer norms without a cache": {"cache": "none", "qk_norm": "layer", "attn_weights": True},
    "cross-attention": {"cross": True, "causal": False, "cache": "none", "bias": "q,v"},
    "a cache in place": IN_PLACE,
    "weights of int4": {"weights_dtype": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
}
DECOMPOSED = {
    "rotary": {"rotary": "half"},
}


@pytest.mark.parametrize("name", [*DECOMPOSED, *KEPT])
@pytest.mark.every(3)
def test_a_program_that_is_not_decomposed_has_the_same_graph(name: str, monkeypatch):
    subject = Subject.from_spec(small_spec(**{**KEPT, **DECOMPOSED}[name]), seed=0)
    kept = []

    def skip(program) -> None:
        skip_empty_decomposition(program)
        kept.append("run_decompositions" in vars(program))

    skip_empty_decomposition = exporter.skip_empty_decomposition
    monkeypatch.setattr(exporter, "skip_empty_decomposition", skip)
    found = to_bytes(exporter.export(subject).model)
    monkeypatch.setattr(exporter, "skip_empty_decomposition", lambda _: None)
    assert found == to_bytes(exporter.export(subject).model)
    assert kept == [name in KEPT]


def to_bytes(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("operation", "numbers", "options"),
    [
        (torch.ops.aten.log_sigmoid.default, [-800, -90, -1, 0, 1, 10, 80], ()),
        (torch.ops.aten.expm1.default, [-30, -1, -1e-4, 1e-6, 1, 20], ()),
        (torch.ops.aten.log1p.default, [-0.9, -1e-5, 0, 1e-20, 1e-4, 0.49, 0.51, 1e6], ()),
        (torch.ops.aten.softplus.default, [-80, -15, -1, 0, 1, 19, 21, 90], ()),
        (torch.ops.aten.softplus.default, [-40, -1, 0, 1, 2.4, 2.6, 80], (2.0, 5.0)),
    ],
)
def test_a_function_keeps_its_digits(operation, numbers, options):
    x = np.array(numbers, np.float32)
    found = translations()[operation](x, *options)
    wanted = operation(torch.from_numpy(x).double(), *options).numpy()
    np.testing.assert_allclose(found.value, wanted, rtol=1e-6)
