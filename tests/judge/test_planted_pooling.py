"""K/V heads that are pooled in another way than by their mean: the judge must catch it.

Legend: Hkv key/value heads of the checkpoint, n of them after pooling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import small_spec
from safetensors.torch import save_file
from torch import Tensor
from truth import Truth

from attn_export.export.subject import Subject
from attn_export.judge.judge import judge
from attn_export.results import Verdict
from attn_export.spec import AttentionSpec
from attn_export.truth.oracle import Oracle
from attn_export.weights.checkpoint import load_checkpoint
from attn_export.weights.layouts import pack_weights, separate_weights

pytestmark = pytest.mark.xdist_group("test_planted_pooling")  # what it makes is shared

Weights = dict[str, Tensor]
Heads = Callable[[Tensor], Tensor]
"""One K/V head for each block of them: `[n, Hkv / n, D, ...]` to `[n, D, ...]`."""

KV_HEADS = 2

SPECS = {
    "mha_biases_rotary": small_spec(embed_dim=64, num_heads=8, num_kv_heads=8, rotary="half"),
    "gqa_packed_learned_key": small_spec(
        embed_dim=64, num_heads=8, packed_qkv=True, num_kv_heads=4, add_bias_kv=True,
    ),
    "norm_no_biases_weights": small_spec(
        num_kv_heads=4, qk_norm="rms", norm_eps=1e-2, bias="none", cache="none", causal=False,
        attn_mask="none", attn_weights=True,
    ),
}  # fmt: skip


def mean(heads: Tensor) -> Tensor:
    return heads.double().mean(1).float()


def first(heads: Tensor) -> Tensor:
    return heads[:, 0]


def last(heads: Tensor) -> Tensor:
    return heads[:, -1]


def total(heads: Tensor) -> Tensor:
    return heads.sum(1)


def median(heads: Tensor) -> Tensor:
    return heads.median(1).values


def mean_of_strided(heads: Tensor) -> Tensor:
    """Return the mean of every n-th head, as if K/V heads were tiled: h uses h % n."""
    n, each = heads.shape[:2]
    return mean(heads.flatten(0, 1).unflatten(0, (each, n)).transpose(0, 1))


def mean_in_bfloat16(heads: Tensor) -> Tensor:
    return heads.bfloat16().mean(1).float()


ALL = ("k_proj.", "v_proj.", "added_keys.")
FAULTS: dict[str, tuple[Heads, tuple[str, ...]]] = {
    "pooled_by_first_head": (first, ALL),
    "pooled_by_last_head": (last, ALL),
    "pooled_by_sum": (total, ALL),
    "pooled_by_median": (median, ALL),
    "pooled_by_strides": (mean_of_strided, ALL),
    "pooled_in_bfloat16": (mean_in_bfloat16, ALL),
    "keys_pooled_by_first_head": (first, ("k_proj.",)),
    "values_pooled_by_first_head": (first, ("v_proj.",)),
    "value_bias_pooled_by_first_head": (first, ("v_proj.bias",)),
    "learned_key_pooled_by_first_head": (first, ("added_keys.bias_k",)),
    "learned_value_pooled_by_first_head": (first, ("added_keys.bias_v",)),
}
"""The way to pool, and the weights; all others are pooled by their mean."""


def pooled(weights: Weights, spec: AttentionSpec, how: Heads, which: tuple[str, ...]) -> Weights:
    """Pool K/V heads with `how`, independently of `attn_export.weights.layouts`."""
    found = {}
    for name, tensor in separate_weights(weights, spec).items():
        if name.startswith(ALL):
            blocks = tensor.unflatten(0, (KV_HEADS, spec.num_kv_heads // KV_HEADS, -1))
            tensor = (how if name.startswith(which) else mean)(blocks).flatten(0, 1)
        found[name] = tensor
    return pack_weights(found) if spec.packed_qkv else found


def subject_of(spec: AttentionSpec, weights: Weights) -> Subject:
    subject = Subject.from_spec(spec)
    subject.module.load_state_dict(weights)
    return subject


@functools.cache
def checkpoint(spec_name: str) -> Weights:
    """Return the content of the file: the weights of the spec as it is."""
    return dict(Subject.from_spec(SPECS[spec_name], seed=1).module.state_dict())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def truth(spec_name: str, folder: Path) -> tuple[AttentionSpec, Truth]:
    """Load and pool the checkpoint with the package, and return the truth of all its cases."""
    path = folder / f"{spec_name}.safetensors"
    save_file({f"self_attn.{name}": t.clone() for name, t in checkpoint(spec_name).items()}, path)
    loaded = load_checkpoint(path, spec=SPECS[spec_name], pool_kv_heads=KV_HEADS)
    subject = subject_of(loaded.spec, loaded.weights)
    return loaded.spec, Truth(subject.plan().cases, Oracle(subject).golden)


def verdicts_of(
    spec_name: str, folder: Path, how: Heads, which: tuple[str, ...] = ALL
) -> Iterator[Verdict]:
    """Yield the verdicts on a module with weights that are pooled in this way."""
    spec, goldens = truth(spec_name, folder)
    weights = pooled(checkpoint(spec_name), SPECS[spec_name], how, which)
    oracle = Oracle(subject_of(spec, weights))
    for case in goldens.cases:
        golden = goldens.of(case)
        yield from judge("pooled", "none", golden, oracle.eager(golden.case.inputs))


@pytest.mark.parametrize("spec_name", SPECS)
@pytest.mark.every(4)
def test_heads_pooled_by_their_mean_pass_every_case(spec_name, folder):
    verdicts = list(verdicts_of(spec_name, folder, mean))
    spec, goldens = truth(spec_name, folder)
    assert [v for v in verdicts if v.status != "passed"] == []
    assert len(verdicts) == len(goldens.cases) * len(spec.output_shapes())


def changes_something(spec_name: str, name: str) -> bool:
    """Return whether a fault changes weights: not every spec has biases, or a learned key."""
    how, which = FAULTS[name]
    right, wrong = (
        pooled(checkpoint(spec_name), SPECS[spec_name], of, which) for of in (mean, how)
    )
    return any(not torch.equal(right[weight], wrong[weight]) for weight in right)


PLANTED = [(spec, name) for name in FAULTS for spec in SPECS if changes_something(spec, name)]


def test_each_fault_is_planted_somewhere():
    assert {name for _, name in PLANTED} == set(FAULTS)


@pytest.mark.parametrize(("spec_name", "name"), PLANTED)
def test_heads_pooled_in_another_way_are_caught(spec_name, name, folder):
    verdicts = verdicts_of(spec_name, folder, *FAULTS[name])
    assert any(v.status == "failed" for v in verdicts), "not caught"


@pytest.mark.parametrize("spec_name", SPECS)
def test_heads_that_are_not_pooled_are_caught(spec_name, folder):
    """Check that means of such heads are no approximation within the allowed error."""
    spec = SPECS[spec_name]
    oracle = Oracle(subject_of(spec, checkpoint(spec_name)))
    _, goldens = truth(spec_name, folder)
    seen = set()
    for case in goldens.cases:
        golden = goldens.of(case)
        inputs = dict(golden.case.inputs)
        for name in {"past_key", "past_value"} & inputs.keys():
            inputs[name] = inputs[name].repeat(spec.num_kv_heads // KV_HEADS, axis=1)
        output = {"output": oracle.eager(inputs)["output"]}
        seen |= {v.status for v in judge("all", "none", golden, output) if v.output == "output"}
        if "failed" in seen:
            return
    pytest.fail(f"not caught: {seen}")
