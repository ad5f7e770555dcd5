"""A cache of 4 bits with scales by block: its bytes, its range, and how much it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small_spec

from attn_export.attention import Attention
from attn_export.attention.block_scales import BlockScales, byte_scales, hadamard
from attn_export.attention.quantised import new_keys_and_values, token_inputs, unquantise
from attn_export.spec import AttentionSpec

STEPS = 2.0 ** (np.arange(256) / 8 - 24)


def spec_of(**changes: object) -> AttentionSpec:
    usual = {
        "cache": "in-place", "kv_dtype": "int4", "kv_scale": "per-block", "attn_mask": "none",
        "head_dim": 64,
    }  # fmt: skip
    return small_spec(**usual | changes)


def rows_of(x: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of `[..., D]` and what they stand for, written down block by block."""
    flat = x.reshape(-1, x.shape[-1])
    rows, meant = [], []
    for channels in flat:
        halves, scales, zeros, read = [], [], [], []
        for part in channels.reshape(-1, block):
            span = max(part.max() - part.min(), abs(part.min()) / 8)
            index = next((i for i in range(255) if span <= np.float32(STEPS[i]) * 15.5), 255)
            step = float(np.float32(STEPS[index]))
            whole = np.clip(np.rint(part / step), -128, 142)
            zero = min(whole.min(), 127)
            inside = np.minimum(whole - zero, 15)
            halves += inside.astype(int).tolist()
            scales.append(index)
            zeros.append(int(zero) + 128)
            read += ((inside + zero) * step).tolist()
        pairs = [low + 16 * high for low, high in zip(halves[::2], halves[1::2], strict=True)]
        rows.append(pairs + scales + zeros)
        meant.append(read)
    shape = x.shape[:-1]
    return (
        np.array(rows, np.uint8).reshape(*shape, -1), np.array(meant).reshape(*shape, -1),
    )  # fmt: skip


@pytest.mark.parametrize("width", [8, 40, 48, 64])
@pytest.mark.parametrize("content", ["random", "offset", "quiet", "loud", "zero", "outlier"])
def test_bytes_are_those_of_the_definition(width: int, content: str):
    scales = BlockScales(spec_of(head_dim=width)).double()
    x = np.random.default_rng(0).standard_normal((1, 2, 5, width))
    x = {
        "random": x, "offset": x + 100, "quiet": x * 1e-6, "loud": x * 1e4, "zero": x * 0,
        "outlier": x * np.where(np.arange(width) == 3, 50, 1),
    }[content]  # fmt: skip
    key = torch.from_numpy(x)
    held = scales(key, key)[0]
    block = {8: 8, 40: 20, 48: 24, 64: 32}[width]
    rows, meant = rows_of(x, block)
    assert held.dtype == torch.uint8
    assert np.array_equal(held.numpy(), rows)
    read = scales.read(held, held, torch.float64)[0].numpy()
    np.testing.assert_array_equal(read, meant)
    if content in ("random", "quiet", "outlier", "zero"):
        step = scales.quotients(key, key)[0].steps.numpy()
        assert (abs(read - x) <= step).all()


def test_numbers_beyond_all_scales_are_clipped_and_disturb_no_other_token():
    scales = BlockScales(spec_of()).double()
    key = torch.randn(1, 1, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = scales(key, key)[0]
    key[0, 0, 1], key[0, 0, 2, 3], key[0, 0, 3, 40] = 1e30, -1e30, torch.inf
    after = scales(key, key)[0]
    assert torch.equal(after[0, 0, 0], before[0, 0, 0])
    read = scales.read(after, after, torch.float64)[0]
    assert read.isfinite().all()
    assert (after[0, 0, 1, 32:] == 255).all()
    assert read[0, 0, 2, 3] < -1e4
    assert read[0, 0, 3, 40] > 3e3


def test_each_octave_of_scales_doubles_exactly():
    scales = byte_scales()
    assert torch.equal(scales[8:], 2 * scales[:-8])
    assert (scales[0], scales[192]) == (2.0**-24, 1.0)
    assert (scales.diff() > 0).all()


@pytest.mark.parametrize("width", [2, 8, 40, 64, 96, 128])
def test_the_matrix_is_orthogonal_and_symmetric(width: int):
    matrix = hadamard(width).double()
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix @ matrix, torch.eye(width, dtype=torch.float64), atol=1e-6)
    power = width & -width
    assert (matrix != 0).sum(0).eq(power).all()


def signal_over_noise(f: torch.Tensor, q: torch.Tensor) -> float:
    return float(10 * torch.log10(f.square().sum() / (f - q).square().sum()))


@pytest.mark.parametrize("outliers", [1.0, 8.0])
@pytest.mark.parametrize("variant", ["mha", "mqa", "gqa"])
def test_keys_values_and_output_keep_20_db(variant: str, outliers: float):
    spec = AttentionSpec.variant(
        variant, cache="in-place", kv_dtype="int4", kv_scale="per-block", attn_mask="none"
    )
    torch.manual_seed(0)
    module = Attention(spec).eval()
    D, rng = spec.head_dim, np.random.default_rng(0)
    channels = [h * D + c for h in range(spec.num_kv_heads) for c in rng.choice(D, 2, False)]
    with torch.no_grad():  # two channels of each head
        module.k_proj.weight[channels] *= outliers
        module.k_proj.bias[channels] *= outliers
        before, module = unquantise(module).double(), module.double()
        tokens = torch.randn(1, 256, spec.embed_dim, dtype=torch.float64)
        inputs = token_inputs(spec, {"query": tokens})
        key, value = new_keys_and_values(module, inputs)
        held = module.kv_scales(key, value)
        meant = module.kv_scales.read(*held, torch.float64)
        floats = token_inputs(before.spec, {"query": tokens})
        past = {name: floats[name].double() for name in ("past_key", "past_value")}
        wanted, found = before(**floats | past)[0], module(**inputs)[0]
    assert signal_over_noise(key, meant[0]) > 21
    assert signal_over_noise(value, meant[1]) > 21
    assert signal_over_noise(wanted, found) > 20.5
    assert [x.nbytes for x in held] == [36 * key[..., 0].numel()] * 2
    assert held[0].nbytes / (4 * key.numel()) < 0.15


def test_a_channel_of_outliers_takes_digits_without_the_matrix():
    scales = BlockScales(spec_of()).double()
    key = torch.randn(
        1, 1, 500, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    key[..., [5, 40]] *= 8
    mixed = scales.change_basis(key)
    plain, better = (
        signal_over_noise(x, scales.read(*scales(x, x), torch.float64)[0]) for x in (key, mixed)
    )
    assert plain < 20 < 22 < better
    assert torch.allclose(scales.change_basis(mixed), key)
