"""Tests of refused modules: the error names the construct, its line, and a replacement."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

from attn_export import Attention, AttentionSpec, Subject, build
from attn_export.errors import ExportError, UsageError
from attn_export.export.export import export
from attn_export.source_location import is_user_file

# fmt: off


class Theirs(nn.Module):
    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function
        self.ours = Attention(AttentionSpec(embed_dim=8, num_heads=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)                                               # line


def branch_on_values(m, x):
    if x.sum() > 0:                                                                 # line
        return x
    return m.linear(x)




def causal_by_size(m, x):
    q = m.linear(x)[:, None]
    return F.scaled_dot_product_attention(q, q, q, is_causal=q.shape[2] > 1)        # line


def unlike_ranks(m, x):
    q = m.linear(x)[:, None, None]
    return F.scaled_dot_product_attention(q, q[0], q[0]).squeeze(1)                      # line


def numpy_inside(m, x):
    return m.linear(x) + torch.from_numpy(np.sin(x.numpy()))                        # line


def loop_over_tokens(m, x):
    done = []
    for i in range(x.shape[1]):                                                     # line
        done.append(m.linear(x[:, i]))
    return torch.stack(done, 1)




def not_batch_7(m, x):
    if x.shape[0] != 7:                                                             # line
        return m.linear(x)
    return x




def even_lengths(m, x):
    if x.shape[1] % 2 == 0:                                                         # line
        return x
    return m.linear(x)


def beside_our_attention(m, x):
    y = m.ours(x)
    if x.shape[1] == 1:                                                             # line
        return y
    return y + x


def cast_within(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.linear(x).float()                                                  # line


def kept_by_size(m, x):
    held = {}
    held[x.shape[1]] = x                                                            # line
    return m.linear(held[x.shape[1]])


def bucketized(m, x):
    return m.linear(x) + torch.bucketize(torch.arange(x.shape[1]), x[0, 1:, 0])[:, None]  # line




@torch.library.custom_op("refusals::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 3)


@thrice.register_fake
def _(x): return torch.empty_like(x)


@torch.library.custom_op("refusals::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 3)


def custom(m, x):
    return thrice(m.linear(x))                                                      # line




def branched(m, x):
    return torch.cond(x.sum() > 0, lambda a: m.linear(a), lambda a: a * 1.0, (x,))  # line


def nested(m, x):
    return torch.nested.nested_tensor(list(m.linear(x))).to_padded_tensor(0.0)      # line






def sparse(m, x):
    return torch.sparse.mm(x[0].to_sparse(), m.linear.weight)[None] + x             # line


def permuted_by_numpy(m, x):
    order = np.random.permutation(x.shape[1])                                       # line
    return m.linear(x)[:, order]




def raises(m, x):
    raise ValueError("mine")                                                        # line


def random(m, x):
    return m.linear(x) + torch.rand_like(x)


def split_by_values(m, x):
    sizes = (x[0, 0] > 0).long()[:2].tolist()
    return torch.cat(x.new_ones(sum(sizes), 8).split(sizes)).sum(0) + x             # line


# fmt: on
NOT_SIZED = "a branch or a size depends on the values of a tensor; use torch.where"
TABLE = {
    branch_on_values: NOT_SIZED,
    causal_by_size: "is_causal depends on a size; pass a plain bool",
    unlike_ranks: "of inputs of unlike ranks; reshape them to",
    numpy_inside: "numpy inside the module; use torch operations",
    loop_over_tokens: "axis 'query_len' (x.shape[1]) was fixed at 5 by the module",
    not_batch_7: "not the module at batch = 7: y differs",
    even_lengths: "the captured program is not the module at query_len = ",
    beside_our_attention: "not the module at query_len = 1: y differs",
    cast_within: "computes in bfloat16 by torch.autocast within forward",
    kept_by_size: "a dict or set with a size as a key; compute what it holds",
    bucketized: "torch.bucketize whose boundaries are no constant; count them: (values",
    custom: "the custom operator refusals::thrice has no ONNX form; pass Subject(…, trans",
    branched: "torch's control flow operator cond cannot be checked",
    nested: "a nested tensor, which cannot be captured; pad the sequences",
    sparse: "a sparse tensor, which cannot be captured; use a dense one",
    permuted_by_numpy: "numpy or Python code that computes with a size; use torch operations",
    raises: "ValueError: mine",
    random: "gives another y for the same inputs; it draws random numbers",
    split_by_values: "a tensor is split into sizes that are values of another",
}
IN_FORWARD = {
    unlike_ranks, cast_within, bucketized, custom, branched, split_by_values,
}  # fmt: skip
"""torch keeps only the lines of `forward` with a captured node."""
WITHOUT_A_LINE = {random}


def line_in(function: Callable[..., object]) -> str:
    """Return the line of the function's comment."""
    first = function.__code__.co_firstlineno
    lines = Path(__file__).read_text().splitlines()[first - 1 : first + 6]
    return f"{Path(__file__).name}:{first + next(i for i, s in enumerate(lines) if '# line' in s)}"


@pytest.mark.parametrize("function", TABLE, ids=lambda function: function.__name__)
@pytest.mark.every(2)
def test_a_refusal_names_the_construct_its_line_and_what_to_write(function):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    axes = {"x": {0: "batch", 1: "query_len"}}
    with pytest.raises(ExportError) as caught:
        export(Subject(Theirs(function).eval(), {"x": x}, axes, ["y"]))
    said = str(caught.value)
    assert TABLE[function] in said
    place = Theirs.forward if function in IN_FORWARD else function
    assert function in WITHOUT_A_LINE or line_in(place) in said
    assert "\n" not in said


def test_a_shape_that_depends_on_values_is_refused(tmp_path: Path):
    subject = Subject(
        Theirs(lambda _, x: x[x > 0]).eval(), {"x": torch.randn(2, 5, 8)}, {"x": {0: "n"}}, ["y"]
    )
    with pytest.raises(ExportError, match="the shape of y depends on values"):
        build(subject, tmp_path / "b")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (torch.jit.script, "a module or function of torch.jit; pass the module from before"),
        (
            partial(quantize_dynamic, qconfig_spec={nn.Linear}),
            "a module quantized by torch.ao.quantization; build the float module",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_that_torch_has_compiled_are_named(wrap, said: str):
    module = nn.Sequential(nn.Linear(8, 8), wrap(nn.Sequential(nn.Linear(8, 8), nn.GELU())))
    subject = Subject(module.eval(), {"input": torch.ones(2, 8)}, {"input": {0: "batch"}}, ["y"])
    with pytest.raises(ExportError, match=re.escape(said)):
        export(subject)


def test_packed_sequences_that_are_split_by_their_offsets_are_named():
    class Packed(nn.Module):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            parts = torch.split(x, cu_seqlens.diff().tolist())
            return torch.cat([F.scaled_dot_product_attention(p, p, p) for p in parts if len(p) > 1])

    inputs = {"x": torch.randn(6, 8), "cu_seqlens": torch.tensor([0, 2, 6])}
    subject = Subject(Packed().eval(), inputs, {"x": {0: "tokens"}}, ["y"])
    with pytest.raises(ExportError, match=r"if cu_seqlens splits packed .* inputs=function"):
        export(subject)


WHOLE = {
    "traced": (lambda: torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8)), "of torch.jit; pass"),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 8)), "of torch.jit; pass the module from"),
    "a function": (lambda: F.relu, "the module is a function, not a torch.nn.Module; wrap it"),
    "lazy": (lambda: nn.LazyLinear(8), "the weight weight has no size yet; load or run"),
    "meta": (lambda: nn.Linear(8, 8, device="meta"), "has no values (it is on the device meta)"),
}


@pytest.mark.parametrize(("make", "said"), WHOLE.values(), ids=WHOLE)
@pytest.mark.filterwarnings("ignore")
def test_other_objects_than_modules_with_weights_are_named(make, said: str):
    with pytest.raises(UsageError, match=re.escape(said)):
        Subject(make(), {"input": torch.ones(2, 8)}, {"input": {0: "batch"}}, ["y"])


@pytest.mark.parametrize(
    ("file", "theirs"),
    [
        (__file__, True), (torch.__file__, False), (F.__file__, False), ("<string>", False),
        (np.__file__, False), (pytest.__file__, True), (build.__code__.co_filename, False),
        (json.__file__, False), ("mtrand.pyx", False),
        ("/x/site-packages/einops/einops.py", False), ("/x/site-packages/vit/layers.py", True),
    ],
)  # fmt: skip
def test_lines_of_tools_are_nobodys(file: str, theirs: bool):
    assert is_user_file(file) == theirs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_input_is_named(layout: torch.layout):
    x = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=layout)
    with pytest.raises(UsageError, match="x is a nested tensor; pass a padded one, and a mask"):
        Subject(Theirs(nested).eval(), {"x": x}, {"x": {0: "batch"}}, ["y"])
