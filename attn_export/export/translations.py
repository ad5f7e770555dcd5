"""Translations to ONNX of operations that the exporter does not translate, or only in part."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import TracedOnnxFunction, opset23
from torch import Tensor
from torch._ops import OpOverload
from torch.export import ExportedProgram

from attn_export.attention.onnx_attention import OPSET

# -- attention ----------------------------------------------------------------------------------

# The exporter's own translation requires 4-D inputs and equal numbers of heads, which PyTorch
# does not. `Attention` shares heads by itself; missing leading axes are added here
# (https://onnx.ai/onnx/operators/onnx__Attention.html).

op: Any = opset23  # Any, since its types do not allow constants in place of values of a graph

_HEADS_AXES = 4


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 (the operator shares heads by their numbers)
) -> Any:
    """Emit one `Attention` node for PyTorch's operation with these arguments."""
    ranks = {len(x.shape) for x in (query, key, value)}
    if len(ranks) != 1:
        raise ValueError(f"only 4D query, key, and value are supported; got {sorted(ranks)} axes")
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}; pass 0 outside training")
    # Where chunks of the sequence have the place of heads, they are one more axis of the batch.
    has_chunks = max(ranks) >= _HEADS_AXES and not isinstance(query.shape[-3], int)
    if max(ranks) > _HEADS_AXES or has_chunks:
        batch = op.Shape(query, end=-2 if has_chunks else -3)
        ones = [1, 1] if has_chunks else [1, 1, 1]
        operands = [_flattened(x, batch, ones) for x in (query, key, value)]
        if attn_mask is not None and len(attn_mask.shape) > 2:
            sizes = [op.Shape(x, start=-2, end=-1) for x in (query, key)]
            whole = op.Concat(op.Constant(value_ints=[1]), *sizes, axis=0)  # runtimes want all rows
            attn_mask = _flattened(op.Expand(attn_mask, whole), batch, ones)
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        out, *_ = op.Attention(
            *operands, attn_mask, None, None, is_causal=int(is_causal), **options
        )
        kept = op.Shape(out, start=2 if has_chunks else 1)
        return op.Reshape(out, op.Concat(batch, kept, axis=0))
    # In [N, L, D], N is often heads times a dynamic batch. N becomes the batch, with one head each.
    missing = {4: [], 3: [1], 2: [0, 1]}[ranks.pop()]
    if missing:
        axes: Any = op.Constant(value_ints=missing)
        query, key, value = (op.Unsqueeze(x, axes) for x in (query, key, value))
        if attn_mask is not None and len(attn_mask.shape) == _HEADS_AXES - 1:
            attn_mask = op.Unsqueeze(attn_mask, axes)
    options = {} if scale is None else {"scale": scale}
    attended, *_ = op.Attention(
        query, key, value, attn_mask, None, None, is_causal=int(is_causal), **options
    )
    return op.Squeeze(attended, axes) if missing else attended


def _flattened(x: Any, batch: Any, ones: list[int]) -> Any:
    """Return `[..., H, L, D]` with one batch axis in place of several; one of them may be `H`."""
    whole = op.Expand(x, op.Concat(batch, op.Constant(value_ints=ones), axis=0))
    first = op.Constant(value_ints=[-1, 1][: _HEADS_AXES - len(ones)])
    shape = op.Concat(first, op.Shape(whole, start=-len(ones)), axis=0)
    return op.Reshape(whole, shape)


# -- ranking ------------------------------------------------------------------------------------


def _sort(
    x: Any,
    *,
    stable: bool | None = None,  # noqa: ARG001 (TopK takes the lowest index first)
    dim: int = -1,
    descending: bool = False,
) -> Any:
    """Emit a `TopK` of all elements, which returns the sorted values and their indices."""
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]), axis=0)
    return op.TopK(x, count, axis=dim, largest=int(descending), sorted=1)


# -- functions that lose digits as the exporter writes them --------------------------------------


def _log1p(x: Any) -> Any:
    """Emit log(1 + x) as 2 atanh(x / (2 + x)) for small x, of which 1 + x keeps few digits."""
    half, one, two = (op.CastLike(op.Constant(value_float=n), x) for n in (0.5, 1.0, 2.0))
    near = op.Mul(two, op.Atanh(op.Div(x, op.Add(x, two))))
    return op.Where(op.Less(op.Abs(x), half), near, op.Log(op.Add(x, one)))


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Emit log(1 + exp(beta x)) / beta: ONNX Runtime's Softplus is wrong by 2 % at -15."""
    factor, most = (op.CastLike(op.Constant(value_float=float(n)), x) for n in (beta, threshold))
    scaled = op.Mul(x, factor)
    found = op.Div(op.Add(op.Relu(scaled), _log1p(op.Exp(op.Neg(op.Abs(scaled))))), factor)
    return op.Where(op.Greater(scaled, most), x, found)


def _log_sigmoid(x: Any) -> Any:
    """Emit log(sigmoid(x)) as -softplus(-x): sigmoid(x) is 0 in float32 from -104 on."""
    return op.Neg(_softplus(op.Neg(x)))


def _expm1(x: Any) -> Any:
    """Emit exp(x) - 1 as tanh(x / 2) (exp(x) + 1), which has all digits for small x."""
    two, one = (op.CastLike(op.Constant(value_float=number), x) for number in (2.0, 1.0))
    return op.Mul(op.Tanh(op.Div(x, two)), op.Add(op.Exp(x), one))


# -- experts ------------------------------------------------------------------------------------


def grouped_product(x: Any, weights: Any, ends: Any) -> Any:
    """Return the product of each row with the matrix of its group, `[N, M]`, as of experts.

    `x`: `[N, K]`, sorted by group.
    `weights`: `[G, K, M]`.
    `ends`: The row at which each group ends, int32 or int64 `[G]`.
    """
    zero, one, last = (op.Constant(value_ints=[axis]) for axis in (0, 1, -1))
    count = op.Squeeze(op.Shape(x, start=0, end=1), zero)
    row = op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1))
    after = op.GreaterOrEqual(op.Unsqueeze(row, one), op.Unsqueeze(op.Cast(ends, to=7), zero))
    group = op.ReduceSum(op.Cast(after, to=7), last, keepdims=0)
    return op.Squeeze(op.MatMul(op.Unsqueeze(x, one), op.Gather(weights, group, axis=0)), one)


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the translations by operation."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.ops.aten.scaled_dot_product_attention.default: _attention,
        torch.ops.aten.sort.stable: _sort,
        torch.ops.aten.log_sigmoid.default: _log_sigmoid,
        torch.ops.aten.log_sigmoid_forward.default: lambda x: (_log_sigmoid(x), x),
        torch.ops.aten.expm1.default: _expm1,
        torch.ops.aten.log1p.default: _log1p,
        torch.ops.aten.softplus.default: _softplus,
    }
    experts = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if experts is not None:  # known once transformers is imported
        table[experts.default] = grouped_product
    return table


# -- complex numbers ----------------------------------------------------------------------------

# The exporter represents complex numbers as pairs of real numbers, and translates few operations on
# them. Others are decomposed into operations on pairs first.


def decompose_complex(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose complex operations are decomposed into operations on real pairs."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    if not any(isinstance(value, Tensor) and value.is_complex() for value in values):
        return program
    decomposed: ExportedProgram = program.run_decompositions(dict(ON_PAIRS))
    return decomposed


def _along(operation: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return an operation along an axis as an operation on pairs."""

    def on_pairs(x: Tensor, axis: int, *args: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        pairs = operation(torch.view_as_real(x), axis if axis >= 0 else axis - 1, *args)
        return torch.view_as_complex(pairs)

    return on_pairs


def _expand(x: Tensor, sizes: Sequence[Any], *, implicit: bool = False) -> Any:  # noqa: ARG001
    if not x.is_complex():
        return NotImplemented
    return torch.view_as_complex(torch.view_as_real(x).expand(*sizes, 2))


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    if not x.is_complex():
        return NotImplemented
    return torch.view_as_complex(torch.ops.aten.index.Tensor(torch.view_as_real(x), list(indices)))


def _exp(x: Tensor) -> Any:
    if not x.is_complex():
        return NotImplemented
    real, imaginary = torch.view_as_real(x).unbind(-1)
    return torch.view_as_complex(
        torch.stack([imaginary.cos(), imaginary.sin()], -1) * real.exp()[..., None]
    )


def _multiply(x: Tensor, number: Any) -> Any:
    if isinstance(number, Tensor) or not (x.is_complex() or isinstance(number, complex)):
        return NotImplemented
    number = complex(number)
    real, imaginary = torch.view_as_real(x).unbind(-1) if x.is_complex() else (x, x * 0)
    pairs = [
        real * number.real - imaginary * number.imag,
        real * number.imag + imaginary * number.real,
    ]
    return torch.view_as_complex(torch.stack(pairs, -1))


ON_PAIRS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.unsqueeze.default: _along(torch.ops.aten.unsqueeze.default),
    torch.ops.aten.select.int: _along(torch.ops.aten.select.int),
    torch.ops.aten.expand.default: _expand,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.exp.default: _exp,
    torch.ops.aten.mul.Scalar: _multiply,
    torch.ops.aten.mul.Tensor: _multiply,
}
"""Decompositions of complex operations. NotImplemented leaves operations on real operands alone."""


# -- opsets --------------------------------------------------------------------------------------


def least_opset(program: ExportedProgram) -> int:
    """Return the least opset with all ONNX nodes that our attention emitted."""
    versions = [node.kwargs.get("version") for node in program.graph.nodes]
    return max([OPSET, *(version for version in versions if isinstance(version, int))])


def import_newer_operators(model: ir.Model) -> None:
    """Declare the opset of operators that are newer than PyTorch, which emit as an older one."""
    opset = model.graph.opset_imports[""]
    unknown = [
        n.op_type for n in model.graph if not n.domain and not onnx.defs.has(n.op_type, opset)
    ]
    newer = (onnx.defs.get_schema(name).since_version for name in unknown)
    model.graph.opset_imports[""] = max([opset, *newer])


# -- integers ------------------------------------------------------------------------------------


def cast_subtracted_integers(program: ExportedProgram) -> None:
    """Cast integers that are taken from a floating number, as in ``1.0 - mask``, in place.

    The exporter's promotion of types fails for a number before a tensor.
    """
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.rsub.Scalar):
        x, dtype = node.args[0], node.meta["val"].dtype
        if x.meta["val"].dtype == dtype:
            continue
        with program.graph.inserting_before(node):
            cast = program.graph.call_function(torch.ops.aten.to.dtype, (x, dtype))
        cast.meta = {**node.meta, "val": x.meta["val"].to(dtype)}
        node.args = (cast, *node.args[1:])


# -- time ---------------------------------------------------------------------------------------


_PRESERVED = frozenset({
    "add.Tensor", "arange.default", "arange.start", "cat.default", "expand.default",
    "flatten.using_ints", "layer_norm.default", "linear.default", "rms_norm.default",
    "slice.Tensor", "split_with_sizes.default", "sym_size.int", "transpose.int", "unflatten.int",
    "unsqueeze.default",
})  # fmt: skip
"""Operations of `Attention` that the exporter's decomposition leaves as they are."""


def skip_empty_decomposition(program: ExportedProgram) -> None:
    """Let the exporter keep a program of `Attention` whose operations are all in `_PRESERVED`.

    Otherwise the exporter traces it again to decompose it, which takes half the time of an export.
    """
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    if all(_is_preserved(target) for target in targets):
        program.run_decompositions = lambda _: program


def _is_preserved(target: Any) -> bool:
    """Return whether decomposition leaves an operation as it is."""
    if not isinstance(target, OpOverload):
        return target in (operator.getitem, operator.add)  # of outputs and of sizes
    is_ours = target.namespace == "onnx_symbolic"  # emitted by `emit_canonical_attention`
    return is_ours or str(target).removeprefix("aten.") in _PRESERVED


@contextlib.contextmanager
def without_parsing() -> Iterator[None]:
    """Let the exporter register its translations without parsing their source.

    It parses the source of 500 functions only to read their domain, which takes a fifth of a first
    export.
    """
    function_ir = TracedOnnxFunction.function_ir

    def domain_only(function: Any) -> Any:
        return SimpleNamespace(domain=function.opset.domain)

    TracedOnnxFunction.function_ir = property(domain_only)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        TracedOnnxFunction.function_ir = function_ir  # type: ignore[method-assign]
