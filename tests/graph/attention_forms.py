"""`Attention` nodes with all combinations of inputs, and their reference outputs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime import InferenceSession, OrtValue

from attn_export.graph import IrGraph

OUTPUTS = ("Y", "present_key", "present_value", "scores")


@dataclasses.dataclass(frozen=True)
class Form:
    """One `Attention` node with symbolic batch and lengths."""

    heads: tuple[int, int] = (4, 2)
    packed: bool = False
    mask: tuple[str | int, ...] = ()
    mask_type: str = "bool"
    past: bool = False
    valid_keys: bool = False
    in_place: bool = False
    own_keys: bool = False
    half: bool = False
    widths: tuple[int, int] = (8, 6)
    outputs: int = 1
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def float_type(self) -> int:
        return TensorProto.FLOAT16 if self.half else TensorProto.FLOAT

    @property
    def new(self) -> str:
        """The length of the inputs K and V."""
        return "L" if self.own_keys or self.in_place else "N"

    @property
    def keys(self) -> str:
        """The length of all keys."""
        return "S" if self.past or self.in_place else self.new

    def inputs(self) -> dict[str, tuple[int, tuple[str | int, ...]]]:
        (H, Hkv), (D, Dv) = self.heads, self.widths
        if self.packed:
            shapes = {
                "Q": ("B", "L", H * D),
                "K": ("B", self.new, Hkv * D),
                "V": ("B", self.new, Hkv * Dv),
            }
        else:
            shapes = {
                "Q": ("B", H, "L", D),
                "K": ("B", Hkv, self.new, D),
                "V": ("B", Hkv, self.new, Dv),
            }
        found = {name: (self.float_type, shape) for name, shape in shapes.items()}
        if self.mask:
            kind = TensorProto.BOOL if self.mask_type == "bool" else self.float_type
            found["mask"] = (kind, tuple(self.keys if axis == "S" else axis for axis in self.mask))
        if self.past or self.in_place:
            length = "P" if self.past else "S"
            found["past_key"] = (self.float_type, ("B", Hkv, length, D))
            found["past_value"] = (self.float_type, ("B", Hkv, length, Dv))
        if self.in_place:
            found["past_length"] = (TensorProto.INT64, ("B",))
        if self.valid_keys:
            found["valid"] = (TensorProto.INT64, ("B",))
        return found

    def output_shapes(self) -> tuple[tuple[str | int, ...], ...]:
        (H, Hkv), (D, Dv) = self.heads, self.widths
        keys = self.keys
        attended = ("B", "L", H * Dv) if self.packed else ("B", H, "L", Dv)
        return attended, ("B", Hkv, keys, D), ("B", Hkv, keys, Dv), ("B", H, "L", keys)

    def model(self) -> onnx.ModelProto:
        given = self.inputs()
        names = ["Q", "K", "V", "mask", "past_key", "past_value", "valid"]
        if self.in_place:
            names = ["Q", "present_key", "present_value", "mask", "", "", "total"]
        names = [
            n if n in {**given, "present_key": 0, "present_value": 0, "total": 0} else ""
            for n in names
        ]
        while not names[-1]:
            names.pop()
        attributes = dict(self.attributes)
        if self.packed:
            attributes |= {"q_num_heads": self.heads[0], "kv_num_heads": self.heads[1]}
        made = OUTPUTS[:1] if self.in_place else OUTPUTS[: self.outputs]
        node = helper.make_node("Attention", names, list(made), "attention", **attributes)
        inputs = [helper.make_tensor_value_info(n, *what) for n, what in given.items()]
        outputs = [
            helper.make_tensor_value_info(name, self.float_type, shape)
            for name, shape in zip(OUTPUTS[: self.outputs], self.output_shapes(), strict=False)
        ]
        nodes = [*(scatters() if self.in_place else []), node]
        graph = helper.make_graph(nodes, "g", inputs, outputs)
        opset = helper.make_opsetid("", 24 if self.valid_keys or self.in_place else 23)
        return helper.make_model(graph, opset_imports=[opset], ir_version=11)

    def draw(self, B: int, L: int, N: int, P: int) -> dict[str, np.ndarray]:
        random = np.random.default_rng([B, L, N, P])
        N = L if self.own_keys or self.in_place else N
        S = N + P if self.past or self.in_place else N
        sizes = {"B": B, "L": L, "N": N, "P": P, "S": S, "short": max(1, S - 1)}
        drawn = {}
        for name, (kind, shape) in self.inputs().items():
            size = tuple(sizes.get(axis, axis) for axis in shape)
            if kind == TensorProto.BOOL:
                drawn[name] = random.random(size) < 0.7
            elif kind == TensorProto.INT64:
                low, high = (0, P) if name == "past_length" else (min(L, N), N)
                drawn[name] = random.integers(low, high, size, endpoint=True)
            else:
                drawn[name] = random.standard_normal(size).astype(
                    np.float16 if self.half else np.float32
                )
                if name == "mask":
                    drawn[name][random.random(size) < 0.3] = -np.inf
        return drawn


def attributes(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


SHARING = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
MASKS: dict[str, tuple[str | int, ...]] = {
    "none": (), "[L,S]": ("L", "S"), "[1,S]": (1, "S"), "[1,L,S]": (1, "L", "S"),
    "[H,L,S]": (4, "L", "S"), "[B,1,1,S]": ("B", 1, 1, "S"), "[B,1,L,S]": ("B", 1, "L", "S"),
    "[B,H,L,S]": ("B", 4, "L", "S"), "[1,H,1,S]": (1, 4, 1, "S"), "[S]": ("S",),
    "short [L,S-1]": ("L", "short"), "short [B,H,L,S-1]": ("B", 4, "L", "short"),
}  # fmt: skip

FORMS = {
    f"{sharing}, mask {mask} {kind}, {'past' if past else 'no past'}": Form(
        heads=SHARING[sharing], mask=MASKS[mask], mask_type=kind, past=past,
        outputs=3 if past else 1,
    )
    for sharing, mask, kind, past in itertools.product(
        SHARING, MASKS, ("bool", "float"), (False, True)
    )
    if mask != "none" or kind == "bool"
} | {
    f"{sharing}, {rank}, {name}": Form(
        heads=SHARING[sharing], packed=rank == "3-D", **options  # type: ignore[arg-type]
    )
    for sharing, rank, (name, options) in itertools.product(
        SHARING,
        ("3-D", "4-D"),
        {
            "plain": {},
            "causal": {"attributes": attributes(is_causal=1)},
            "causal, past": {"attributes": attributes(is_causal=1), "past": True, "outputs": 3},
            "causal, mask": {
                "attributes": attributes(is_causal=1), "mask": ("B", 1, "L", "S"), "outputs": 1,
            },
            "causal, float mask of each head, past": {
                "attributes": attributes(is_causal=1), "mask": ("B", 4, "L", "S"),
                "mask_type": "float", "past": True, "outputs": 3,
            },
            "softcap, mask": {
                "attributes": attributes(softcap=0.7), "mask": ("L", "S"), "mask_type": "float",
            },
            "scale": {"attributes": attributes(scale=0.3)},
            "valid keys": {"valid_keys": True},
            "valid keys, mask": {"valid_keys": True, "mask": ("B", 4, "L", "S")},
            "half": {"half": True, "mask": ("B", 1, 1, "S")},
            "half, softmax in float": {
                "half": True, "attributes": attributes(softmax_precision=TensorProto.FLOAT),
            },
            **{
                f"scores of mode {mode}": {
                    "outputs": 4, "past": True, "mask": ("B", 1, "L", "S"),
                    "attributes": attributes(
                        # The evaluator gives scores of mode 0 after softcap, the text before.
                        qk_matmul_output_mode=mode, softcap=0.9 if mode else 0.0, is_causal=1
                    ),
                }
                for mode in range(4)
            },
        }.items(),
    )
}  # fmt: skip
SIZES = ((2, 3, 4, 2), (1, 1, 1, 0), (3, 5, 5, 1), (2, 1, 6, 7))  # B, L, new keys, past


def scatters() -> list[onnx.NodeProto]:
    """Return the nodes in front of an `Attention` whose cache is written in place."""
    return [
        helper.make_node(
            "TensorScatter", [f"past_{x}", new, "past_length"], [f"present_{x}"], f"scatter_{x}"
        )
        for x, new in (("key", "K"), ("value", "V"))
    ] + [
        helper.make_node("Shape", ["Q"], ["length"], "length", start=-2, end=-1),
        helper.make_node("Add", ["past_length", "length"], ["total"], "total"),
    ]


IN_PLACE = {
    f"{sharing}, in place, {name}": Form(
        heads=SHARING[sharing], in_place=True, outputs=3, **options  # type: ignore[arg-type]
    )
    for sharing, (name, options) in itertools.product(
        SHARING,
        {
            "plain": {"widths": (8, 8)},
            "causal": {"widths": (8, 8), "attributes": attributes(is_causal=1)},
            "causal, Dv 6": {"attributes": attributes(is_causal=1)},
            "causal, D 6": {"widths": (6, 6), "attributes": attributes(is_causal=1)},
            "causal, padding": {
                "widths": (8, 8), "attributes": attributes(is_causal=1), "mask": ("B", 1, "L", "S"),
            },
            "causal, float mask, softcap": {
                "widths": (8, 8), "attributes": attributes(is_causal=1, softcap=0.7),
                "mask": ("L", "S"), "mask_type": "float",
            },
            "mask of each head": {"mask": ("B", 4, "L", "S")},
            "half": {"half": True, "attributes": attributes(is_causal=1), "widths": (8, 8)},
        }.items(),
    )
}  # fmt: skip


def session(model: ir.Model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def bound_run(
    engine: InferenceSession, inputs: dict[str, np.ndarray], form: IrGraph
) -> list[np.ndarray]:
    """Return the outputs in their usual layout; bound caches share one buffer."""
    given = {name: laid_out(form, name, array) for name, array in inputs.items()}
    values = {name: OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
    binding = engine.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    names = [output.name for output in engine.get_outputs()]
    for name in names:
        if name in form.file.bound:
            binding.bind_ortvalue_output(name, values[form.file.bound[name]])
        else:
            binding.bind_output(name)
    engine.run_with_iobinding(binding)
    outputs = dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))
    return [laid_out(form, name, array) for name, array in outputs.items()]


def laid_out(form: IrGraph, name: str, array: np.ndarray) -> np.ndarray:
    """Transpose to the form's axis order; swapping two axes is its own inverse."""
    order = form.file.layouts.get(name)
    return np.ascontiguousarray(array.transpose(order)) if order else array.copy()
