"""Sizes that a user states: relations with products and inequalities, multiples, lists."""

from __future__ import annotations

import pytest
import torch
from agreement import right_graphs
from shared import extended
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject
from attn_export.errors import UsageError

E = 16
X = {0: "batch", 1: "query_len"}


class Relative(nn.Module):
    """Attention with relative positions: a row for each distance, as in Transformer-XL."""

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        B, L, _ = x.shape
        shifted = nn.functional.pad(x @ rows.T, (1, 0)).view(B, -1, L)[:, 1:]
        return (x @ x.mT + shifted.view(B, L, 2 * L - 1)[..., :L]).softmax(-1) @ x


class Blocks(nn.Module):
    """Attention within blocks of 4."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.view(x.shape[0], -1, 4, E)
        return attend(blocks, blocks, blocks).flatten(1, 2)


class Grid(nn.Module):
    """Patches whose number is that of the cells of a grid."""

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        x = x + grid.flatten(0, 1)
        return attend(x, x, x)


class Rotated(nn.Module):
    """Tables of positions that are longer than the sequence."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x * table[: x.shape[1]]
        return attend(x, x, x)


class Images(nn.Module):
    """Keys of some images for each element of the batch."""

    def forward(self, x: Tensor, images: Tensor) -> Tensor:
        keys = images.reshape(x.shape[0], -1, E)
        return attend(x, keys, keys)


def of(module: nn.Module, axes: dict, *sizes: tuple[int, ...], **options: object) -> Subject:
    inputs = {name: torch.randn(*size, E) for name, size in zip(axes, sizes, strict=True)}
    return Subject(module.eval(), inputs, axes, ["y"], **options)


BUILT = {
    "a row for each distance": (
        lambda: of(
            Relative(), {"x": X, "rows": {0: "rows"}}, (2, 5), (9,),
            relations={"rows": "2*query_len - 1"},
        ),
        ["query_len", "rows"],
    ),
    "blocks": (
        lambda: of(Blocks(), {"x": {0: "batch", 1: Axis("query_len", multiple_of=4)}}, (2, 8)),
        ["query_len"],
    ),
    "a grid": (
        lambda: of(
            Grid(), {"x": X, "grid": {0: "height", 1: "width"}}, (2, 12), (3, 4),
            relations={"query_len": "height*width"},
        ),
        ["height", "query_len", "width"],
    ),
    "a table that is longer": (
        lambda: of(
            Rotated(), {"x": X, "table": {0: "most"}}, (2, 5), (12,),
            relations={"most": ">= query_len"},
        ),
        ["most", "query_len"],
    ),
    "some rows for each element": (
        lambda: of(
            Images(), {"x": X, "images": {0: "images", 1: "keys"}}, (2, 5), (6, 7),
            relations={"images": "multiple of batch"},
        ),
        ["images", "keys", "query_len"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", extended(BUILT, lambda name: name in [*BUILT][:2]))
def test_a_module_is_built_at_the_sizes_that_are_stated(name: str):
    make, axes = BUILT[name]
    graph = right_graphs(make())["model.onnx"]
    dims = {dim.dim_param for x in graph.input for dim in x.type.tensor_type.shape.dim}
    assert sorted(dims - {"", "batch"}) == axes


def test_stated_sizes_are_kept():
    axes = {
        "x": {0: "batch", 1: Axis("n", multiple_of=4, max=8)},
        "table": {0: Axis("most", sizes=(8, 12, 48))},
    }
    sizes = [case.sizes for case in of(Rotated(), axes, (2, 8), (12,)).plan().cases]
    assert {each["n"] for each in sizes} == {4, 8}
    assert {each["most"] for each in sizes} == {8, 12, 48}


def test_an_axis_may_be_no_less_than_another():
    axes = {"x": X, "table": {0: "most"}}
    subject = of(Rotated(), axes, (2, 5), (12,), relations={"most": ">= query_len"})
    more = {case.sizes["most"] - case.sizes["query_len"] for case in subject.plan().cases}
    assert more > {0, 1, 7}
    assert min(more) == 0


WRONG = {
    "a multiple": (Axis("n", multiple_of=3), {}, "is 8 in the example, and 3, 6 and so on by its"),
    "another size": (Axis("n", sizes=(4, 16)), {}, "is 8 in the example, and 4, 16 by its bounds"),
    "one size": (Axis("n", sizes=(8,)), {}, "Axis('n', sizes=(8,)) must allow two sizes or more"),
    "no multiple": (Axis("n", multiple_of=0), {}, "Axis('n', multiple_of=0) must allow two sizes"),
    "too few": ("n", {"most": ">= 2*n"}, "is 16 in the example, where 'most' is 12"),
    "another multiple": ("n", {"most": "multiple of n"}, "is 8 in the example, where 'most' is 12"),
    "a list and a relation": (
        Axis("n", sizes=(8, 16)), {"n": "8"}, "has both a relation and multiple_of or sizes",
    ),
    "an unknown axis": ("n", {"most": "2*m"}, "'m' is not an axis of an input; write a sum of n"),
}  # fmt: skip


@pytest.mark.parametrize(("axis", "relations", "says"), WRONG.values(), ids=WRONG)
def test_sizes_that_the_example_does_not_have_are_refused(axis, relations: dict, says: str):
    with pytest.raises(UsageError) as caught:
        of(Rotated(), {"x": {1: axis}, "table": {0: "most"}}, (2, 8), (12,), relations=relations)
    assert says in str(caught.value)
