"""Roles of axes: found by what axes do in a module, whatever they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shared import once
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend

from attn_export import Axis, Subject, build, verify
from attn_export.errors import ExportError
from attn_export.export.capture import sizes_to_try
from attn_export.export.export import export

H, D = 2, 4
CACHES = {"new.k": "old_k", "new.v": "old_v"}
BN = {"b": "batch", "n": "query_len"}


class Cached(nn.Module):
    """Attention that appends keys and values to its cache; what is off is a variant of it."""

    def __init__(self, *, returns: bool = True, swapped: bool = False, first: bool = False):
        super().__init__()
        self.proj = nn.Linear(D, D)
        self.returns, self.swapped, self.first = returns, swapped, first

    def forward(self, q: Tensor, old_k: Tensor, old_v: Tensor) -> Any:
        if self.swapped:  # caches [B, P, H, D]
            old_k, old_v = old_k.transpose(1, 2), old_v.transpose(1, 2)
        k, v = torch.cat([old_k, self.proj(q)], 2), torch.cat([old_v, q], 2)
        first = self.first and old_k.shape[2] == 0
        y = attend(q, k, v, is_causal=True if first else False)  # noqa: SIM210 (it is captured)
        return (y, k, v) if self.returns else y


class NeedsPast(Cached):
    def forward(self, q: Tensor, old_k: Tensor, old_v: Tensor) -> Any:
        return super().forward(q - old_k.amax(2, keepdim=True), old_k, old_v)


class Scaled(nn.Module):
    """Attention whose past is scaled before it is appended to, so that only relations show it."""

    def forward(self, q: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        k = torch.cat([old * 2, q], 2)
        return attend(q, k, k, attn_mask=mask)


class Crossing(nn.Module):
    def forward(self, q: Tensor, old_k: Tensor) -> Tensor:
        return attend(q, old_k, old_k)


class OverFirst(nn.Module):
    """Attention over the first axis: [L, B, E]."""

    def forward(self, q: Tensor) -> Tensor:
        x = q.transpose(0, 1)
        return attend(x, x, x).transpose(0, 1)


class Pooled(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return q.softmax(1).sum(1)


class OverBatch(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return (q - q.mean(0)).cumsum(1)


class OverAll(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return nn.functional.batch_norm(q.mT, None, None, training=True)


class Halves(nn.Module):
    def forward(self, q: Tensor, old_k: Tensor) -> Tensor:
        return attend(q, q, q).unflatten(1, (-1, 2)).sum(2) + old_k


class Kernel(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k[:, :-2], k.unfold(1, 3, 1).mean(-1))


def cached(module: nn.Module, *, b="b", n="n", past: Any = "m", at=2, tokens=3) -> Subject:
    shape, old = [2, H, tokens, D], [2, H, 5, D] if at == 2 else [2, 5, H, D]
    inputs = {"q": torch.randn(shape), "old_k": torch.randn(old), "old_v": torch.randn(old)}
    axes = {"q": {0: b} | ({2: n} if tokens > 1 else {})}
    axes |= {key: {0: b, at: past} for key in ("old_k", "old_v")}
    outputs = ["y", "new.k", "new.v"] if module.returns else ["y"]
    return Subject(module.eval(), inputs, axes, outputs)


def of_q(module: nn.Module, axes: dict[int, str], *, relations=None, **more):
    inputs = {"q": torch.randn([2, 4 if relations else 3, D])} | {
        n: torch.randn(shape) for n, (shape, _) in more.items()
    }
    named = {"q": axes} | {name: axes for name, (_, axes) in more.items()}
    return Subject(module.eval(), inputs, named, ["y"], relations=relations)


@pytest.mark.parametrize(
    ("subject", "names", "least", "caches"),
    [
        (cached(Cached()), {**BN, "m": "past_len"}, {"m": 0}, CACHES),
        (cached(Cached(swapped=True), at=1), {**BN, "m": "past_len"}, {"m": 0}, {}),
        (cached(Cached(returns=False)), {**BN, "m": "past_len"}, {"m": 0}, {}),
        (cached(Cached(), tokens=1), {"b": "batch", "m": "past_len"}, {"m": 0}, CACHES),
        (cached(Cached(), b="past_len", n="batch", past="query_len"),
         {"past_len": "batch", "batch": "query_len", "query_len": "past_len"},
         {"query_len": 0}, CACHES),
        (cached(Cached(), past=Axis("m", min=1)), {**BN, "m": "past_len"}, {}, CACHES),
        (cached(Cached(), past=Axis("m", max=9)), {**BN, "m": "past_len"}, {"m": 0}, CACHES),
        (cached(NeedsPast()), {**BN, "m": "past_len"}, {"m": 1}, CACHES),
        (of_q(Crossing(), {0: "b", 1: "n"}, old_k=([2, 5, D], {0: "b", 1: "past_len"})),
         {**BN, "past_len": "key_len"}, {}, {}),
        (of_q(OverFirst(), {0: "n", 1: "b"}), BN, {}, {}),
        (of_q(Pooled(), {0: "b", 1: "n"}), BN, {}, {}),
        (of_q(OverBatch(), {0: "b", 1: "n"}), BN, {}, {}),
        (of_q(OverAll(), {0: "b", 1: "n"}), BN, {"n": 2}, {}),
        (Subject(Kernel().eval(), {name: torch.randn(2, 5, D) for name in "qk"},
                 {"q": {0: "b", 1: "n"}, "k": {0: "b", 1: "s"}}, ["y"]),
         {**BN, "s": "key_len"}, {"s": 3}, {}),
        (of_q(Halves(), {0: "b", 1: "query_len"}, relations={"query_len": "2*pairs"},
              old_k=([2, 2, D], {0: "b", 1: "pairs"})),
         {"b": "batch", "pairs": "query_len", "query_len": "query_len 2"}, {}, {}),
        (Subject(nn.Linear(D, 2).eval(), {"input": torch.randn(3, D)}, {"input": {0: "past_len"}},
                 ["y"]), {"past_len": "batch"}, {}, {}),
    ],
    ids=[
        "a cache", "a cache in another order than heads", "a cache that is not returned",
        "one query", "names of other roles", "at least one by the user", "at most nine",
        "a module that needs a past", "memory called past_len", "the batch second",
        "queries that no output has", "statistics over the batch", "statistics over all rows",
        "a kernel over keys", "a sum called query_len", "rows alone",
    ],
)  # fmt: skip
def test_axes_have_the_roles_of_what_they_do(subject: Subject, names, least, caches):
    roles = subject.roles
    assert (roles.names, roles.least, roles.caches) == (names, least, caches)


@pytest.mark.parametrize("outside", ["mask", "output"])
def test_the_past_of_a_relation_is_what_an_output_continues_or_none_has(outside: str):
    class Masked(Scaled):
        def forward(self, q: Tensor, old: Tensor, mask: Tensor) -> Any:
            y = super().forward(q, old, mask)
            return y if outside == "mask" else (y, torch.cat([old * 2, q], 2))

    inputs = {"q": torch.randn(2, H, 3, D), "old": torch.randn(2, H, 5, D)}
    axes = {"q": {0: "b", 2: "n"}, "old": {0: "b", 2: "m"}, "mask": {0: "b", 2: "n", 3: "s"}}
    mask = torch.ones(2, 1, 3, 8, dtype=torch.bool)
    outputs = ["y", "new"][: 1 + (outside == "output")]
    subject = Subject(
        Masked().eval(), {**inputs, "mask": mask}, axes, outputs, relations={"s": "m + n"}
    )
    assert subject.roles.names == {**BN, "m": "past_len"}
    assert subject.roles.least == {"m": 0}


@pytest.mark.parametrize("past", ["m", "past_sequence_length", Axis("past", min=0)], ids=str)
@pytest.mark.parametrize(
    "module", [Cached(first=True), Cached(first=True, returns=False)], ids="ab"
)
def test_a_branch_on_an_empty_past_of_any_name_is_found(module: nn.Module, past: Any):
    with pytest.raises(ExportError, match=r"not the module at (m|past\w*) = 0: y differs"):
        export(cached(module, past=past))


def test_a_branch_on_an_empty_past_is_outside_a_least_size_of_1():
    subject = cached(Cached(first=True), past=Axis("m", min=1))
    assert min(sizes["m"] for sizes in sizes_to_try(subject)) == 1
    export(subject)


def test_two_pasts_are_both_tried_empty():
    class Two(nn.Module):
        def forward(self, q: Tensor, one: Tensor, other: Tensor) -> Any:
            a, b = torch.cat([one, q], 1), torch.cat([other, q * 2], 1)
            return attend(q, a, a) + attend(q, b, b), a, b

    inputs = {"q": torch.randn(2, 3, D), "one": torch.randn(2, 4, D), "other": torch.randn(2, 5, D)}
    axes = {name: {0: "b", 1: axis} for name, axis in zip(inputs, "nlm", strict=True)}
    subject = Subject(Two().eval(), inputs, axes, ["y", "a", "c"])
    assert subject.roles.least == {"l": 0, "m": 0}
    for axis in "lm":
        assert {0, 1} <= {case.sizes[axis] for case in subject.plan().cases}


class Nested(nn.Module):
    """Attention with nested caches, as transformers' models have them."""

    def forward(self, q: Tensor, past: list[tuple[Tensor, Tensor]]) -> Any:
        (old_k, old_v), *_ = past
        k, v = torch.cat([old_k, q], 1), torch.cat([old_v, 2 * q], 1)
        return attend(q, k, v), ((k, v),)


def nested_caches() -> Path:
    """Return a bundle with nested caches, which has passed."""
    old = [(torch.randn(2, 5, D), torch.randn(2, 5, D))]
    axes = {f"past.0.{i}": {0: "b", 1: "m"} for i in range(2)} | {"q": {0: "b", 1: "n"}}
    outputs = ["y", "present.0.0", "present.0.1"]

    def make(folder: Path) -> None:
        subject = Subject(Nested().eval(), {"q": torch.randn(2, 3, D), "past": old}, axes, outputs)
        report = build(subject, folder, runtimes=["ort-cpu"], dialects=["standard"])
        assert report.passed
        assert "axes by what they do: b is batch, n is query_len, m is past_len" in report.notes

    return once("roles/nested", make)


def test_a_bundle_states_roles_and_caches_and_verifies():
    folder = nested_caches()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["roles"] == {**BN, "m": "past_len"}
    assert manifest["caches"] == {"present.0.0": "past.0.0", "present.0.1": "past.0.1"}
    assert manifest["bounds"] == {"m": [0, None]}
    index = json.loads((folder / "golden" / "index.json").read_text())
    assert {(case["sizes"]["b"], case["sizes"]["m"]) for case in index["cases"]} >= {(1, 0), (2, 0)}
    assert any(case["ignored_rows"] for case in index["cases"])
    assert verify(folder, runtimes=["ort-cpu"]).passed


def test_a_kit_has_nested_caches(kit_says):
    folder = nested_caches()
    assert "passed" in kit_says(folder)
    assert "then 3 tokens" in kit_says(folder, "decode", "--tokens=3")
