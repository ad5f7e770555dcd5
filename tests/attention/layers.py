"""Layers of specs, inputs for them, and what the reference gives."""

from __future__ import annotations

import numpy as np
import numpy_attention
import torch
from conftest import small_spec
from torch import Tensor, nn

from attn_export.attention import Attention
from attn_export.spec import AttentionSpec

Inputs = dict[str, Tensor]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Of rounding alone at small sizes; a wrong head, key or scale is 1e-2 off at least."""


def feature_spec(feature: dict, **changes: object) -> AttentionSpec:
    """Return the small spec with a feature and changes."""
    return small_spec(**{"attn_weights": True, **feature, **changes})


def reference(module: Attention, inputs: Inputs) -> dict[str, Tensor]:
    """Return what `numpy_attention` gives in float64."""
    state = {name: x.double().numpy() for name, x in module.state_dict().items()}
    arrays = {name: x.numpy() for name, x in cast(inputs, torch.float64).items()}
    outputs = numpy_attention.run(module.spec, state, arrays)
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in outputs.items()}


def assert_is_the_reference(module: Attention, inputs: Inputs) -> None:
    """Assert that each output of a module is that of the reference, in its own type."""
    dtype = inputs["query"].dtype
    wanted = reference(module, inputs)
    for name, actual in outputs_of(module, inputs).items():
        assert actual.dtype == dtype
        torch.testing.assert_close(
            actual.double(), wanted[name], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype],
            msg=lambda text, name=name: f"{name}, {module.spec}: {text}",
        )  # fmt: skip


def draw_inputs(
    spec: AttentionSpec, B: int, L: int, P: int = 0, key_len: int = 5, seed: int = 0
) -> Inputs:
    """Draw seeded float64 inputs of a spec; a mask forbids about a third of its possible keys.

    A buffer holds up to P + L keys, and each of its rows holds 0 to P.
    """
    random = torch.Generator().manual_seed(seed)
    sizes: dict[str, int] = {
        "batch": B, "query_len": L, "past_len": P, "total_len": P + L, "key_len": key_len,
        "capacity": P + L,
    }  # fmt: skip
    inputs = {}
    for name, axes in spec.input_shapes().items():
        shape = [axis if isinstance(axis, int) else sizes[axis] for axis in axes]
        if name == "position_ids":
            inputs[name] = torch.randint(0, 20, shape, generator=random)
            continue
        if name == "past_length":
            inputs[name] = torch.randint(0, P + 1, shape, generator=random)
            continue
        inputs[name] = torch.randn(shape, generator=random, dtype=torch.float64)
        if name == "attn_mask":
            allowed = torch.rand(shape, generator=random) > 0.35
            is_bool = spec.attn_mask.startswith("bool")
            inputs[name] = allowed if is_bool else inputs[name].masked_fill(~allowed, -torch.inf)
    return inputs


def make_module(
    spec: AttentionSpec, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Attention:
    """Return a seeded module in evaluation mode."""
    torch.manual_seed(seed)
    return Attention(spec).to(dtype).eval()


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs with the floating ones in another type."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def outputs_of(module: Attention, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return the module's outputs, by the names of its spec."""
    with torch.no_grad():
        returned = module(**inputs)
    names = module.spec.output_shapes()
    tensors = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(names, tensors, strict=True))


def exact_module(spec: AttentionSpec, seed: int = 0) -> Attention:
    """Return a seeded module with float64 buffers, and norms away from their initial values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(seed)
        module = Attention(spec).eval()
        for norm in (module.q_norm, module.k_norm):
            for parameter in norm.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)
    finally:
        torch.set_default_dtype(before)
    return module


TOTAL = 9


def whole_sequence(module: Attention) -> Inputs:
    """Return three sequences of 9, with 0, 2 and 5 of padding on the left."""
    inputs = draw_inputs(module.spec, 3, TOTAL)
    if "attn_mask" in inputs:
        padding = torch.tensor([0, 2, 5]).view(3, 1, 1, 1)
        allowed = torch.arange(TOTAL).view(1, 1, 1, TOTAL) >= padding
        is_bool = inputs["attn_mask"].dtype == torch.bool
        shape = inputs["attn_mask"].shape
        inputs["attn_mask"] = (
            allowed
            if is_bool
            else inputs["attn_mask"].nan_to_num(neginf=0.0).masked_fill(~allowed, -torch.inf)
        ).expand(shape)
    return inputs


def piece_of(whole: Inputs, past: dict[str, Tensor], start: int, stop: int) -> Inputs:
    """Return the inputs of the queries from start to stop, whose keys reach up to stop."""
    piece = {"query": whole["query"][:, start:stop], **past}
    if "position_ids" in whole:
        piece["position_ids"] = whole["position_ids"][:, start:stop]
    if "attn_mask" in whole:
        mask = whole["attn_mask"][..., :stop]
        piece["attn_mask"] = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
    return piece
