"""Whole decodes: a sequence is run step by step, and the outputs are joined."""

from __future__ import annotations

import numpy as np
import pytest

from attn_export.runtimes.decode_steps import BLOCK, decode, decode_returned

Arrays = dict[str, np.ndarray]

AXES = {
    "query": ("batch", "query_len", 2),
    "attn_mask": ("batch", 1, "query_len", "capacity"),
    "past_key": ("batch", 1, "capacity", 2),
    "past_length": ("batch",),
    "position_ids": ("batch", "query_len"),
    "output": ("batch", "query_len", 2),
    "present_key": ("batch", 1, "capacity", 2),
    "attn_weights": ("batch", 1, "query_len", "weights_len"),
}


def inputs_of(tokens: int) -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "query": rng.standard_normal((3, tokens, 2)).astype(np.float32),
        "attn_mask": rng.random((3, 1, tokens, tokens)) < 0.7,
        "past_key": np.full((3, 1, tokens, 2), np.nan, np.float32),
        "past_length": np.zeros(3, np.int64),
        "position_ids": rng.integers(0, 99, (3, tokens)),
    }


class Steps:
    """A graph that sums its inputs, writes queries into the cache, and records the steps."""

    def __init__(self) -> None:
        self.seen: list[Arrays] = []

    def __call__(self, inputs: Arrays) -> Arrays:
        self.seen.append(inputs)
        query, held = inputs["query"], int(inputs["past_length"][0])
        key = inputs["past_key"].copy()
        key[:, 0, held : held + query.shape[1]] = query
        weights = np.where(inputs["attn_mask"], np.float32(1), np.float32(0))
        learned = np.full((*weights.shape[:-1], 1), 7, np.float32)
        return {
            "output": query + inputs["position_ids"][..., None].astype(np.float32),
            "present_key": key,
            "attn_weights": np.concatenate([weights, learned], axis=-1),
        }

    @property
    def counts(self) -> list[int]:
        return [step["query"].shape[1] for step in self.seen]


@pytest.mark.parametrize("fixed", [{}, {"query_len": 1}, {"batch": 1}], ids=str)
@pytest.mark.parametrize("tokens", [3, 64, 65, 300])
def test_the_outputs_are_those_of_the_whole(tokens: int, fixed: dict[str, int]):
    inputs, steps = inputs_of(tokens), Steps()
    outputs = decode(steps, inputs, AXES, fixed)
    for axis, size in fixed.items():
        assert {x["query"].shape[AXES["query"].index(axis)] for x in steps.seen} == {size}
    if "batch" in fixed:  # three rows, in the same steps
        assert steps.counts == steps.counts[: len(steps.counts) // 3] * 3
        steps.seen = steps.seen[: len(steps.seen) // 3]
    wanted = inputs["query"] + inputs["position_ids"][..., None].astype(np.float32)
    np.testing.assert_array_equal(outputs["output"], wanted)
    np.testing.assert_array_equal(outputs["present_key"][:, 0], inputs["query"])
    weights = outputs["attn_weights"]
    assert weights.shape == (3, 1, tokens, tokens + 1)
    assert (weights[..., -1] == 7).all()
    ends = np.repeat(np.cumsum(steps.counts), steps.counts)[:, None]
    seen = inputs["attn_mask"] & (np.arange(tokens) < ends)  # up to the end of a token's step
    np.testing.assert_array_equal(weights[..., :-1], seen)
    assert outputs["output"].dtype == outputs["present_key"].dtype == np.float32


def test_there_are_a_prompt_tokens_and_chunks_and_only_tokens_where_one_is_taken():
    steps, single = Steps(), Steps()
    decode(steps, inputs_of(300), AXES, {})
    decode(single, inputs_of(300), AXES, {"query_len": 1})
    assert steps.counts[:9] == [5, 1, 1, 1, 1, 1, 1, 1, 3]
    assert steps.counts.count(3) == 29
    assert sum(steps.counts) == sum(single.counts) == 300
    assert set(single.counts) == {1}


def test_the_buffers_grow_by_a_block_when_they_are_full_and_keep_what_they_hold():
    steps, inputs = Steps(), inputs_of(300)
    decode(steps, inputs, AXES, {})
    held = 0
    grown_over, grown_full = 0, 0
    capacity = 0
    for step in steps.seen:
        allocated, count = step["past_key"].shape[2], step["query"].shape[1]
        assert (step["past_length"] == held).all()
        assert allocated == -(-(held + count) // BLOCK) * BLOCK
        np.testing.assert_array_equal(step["past_key"][:, 0, :held], inputs["query"][:, :held])
        assert (step["past_key"][:, 0, held:] == 0).all()
        grown_over += allocated > capacity > held
        grown_full += allocated > capacity == held > 0
        held, capacity = held + count, allocated
    assert capacity == 320
    assert (grown_over, grown_full) == (1, 3), "a chunk over the edge, and full buffers"


def test_masks_reach_up_to_the_keys_so_far_and_are_false_behind_them():
    steps, inputs = Steps(), inputs_of(70)
    decode(steps, inputs, AXES, {})
    for step in steps.seen:
        start = int(step["past_length"][0])
        stop = start + step["query"].shape[1]
        mask = step["attn_mask"]
        assert mask.shape == (3, 1, stop - start, step["past_key"].shape[2])
        np.testing.assert_array_equal(
            mask[..., :stop], inputs["attn_mask"][:, :, start:stop, :stop]
        )
        assert not mask[..., stop:].any()


@pytest.mark.parametrize("name", ["output", "present_key"])
def test_an_output_that_is_longer_than_its_step_is_refused_with_the_step(name: str):
    steps = Steps()

    def run(inputs: Arrays) -> Arrays:
        outputs = steps(inputs)
        if inputs["past_length"][0] == 20:
            at = AXES[name].index("query_len" if name == "output" else "capacity")
            outputs[name] = np.concatenate([outputs[name]] * 2, axis=at)
        return outputs

    with pytest.raises(ValueError, match=rf"{name} is \[.*after 20 tokens, with 1 new ones"):
        decode(run, inputs_of(40), AXES, {})


def test_an_output_without_a_name_for_its_axes_is_that_of_the_last_step():
    steps = Steps()
    outputs = decode(
        lambda x: steps(x) | {"more": x["past_length"]}, inputs_of(40), AXES, {"query_len": 1}
    )
    assert outputs["more"].tolist() == [39] * 3


# -- caches that a graph returns ----------------------------------------------------------------

CACHES = {"present": "past", "present.encoder": "past.encoder"}
RETURNED = {
    "ids": ("batch", "query_len"), "past.encoder": ("batch", "key_len"),
    "present.encoder": ("batch", "key_len"), "logits": ("batch", "query_len"),
}  # fmt: skip
GROWING = {"past": ("batch", "past_len"), "present": ("batch", "total_len"), "branch": (1,),
           "mask": ("batch", "total_len")}  # fmt: skip
FIXED = {"past": ("batch", 64), "present": ("batch", 64), "write_at": ("batch",),
         "lengths": ("batch",)}  # fmt: skip


def sums(inputs: Arrays) -> Arrays:
    """Return the sum of all tokens so far at each token, with caches that grow or do not."""
    ids, past = inputs["ids"], inputs["past"]
    if "write_at" in inputs:
        start = inputs["write_at"][0]
        present = past.copy()
        present[:, start : start + ids.shape[1]] = ids
        keys = present[:, : inputs["lengths"][0]]
    else:
        assert inputs["branch"].tolist() == [past.shape[1] > 0]
        keys = present = np.concatenate([past, ids], 1)
        assert inputs["mask"].shape == keys.shape
    first = keys.shape[1] == ids.shape[1]
    encoded = ids[:, :1].repeat(4, 1) if first else inputs["past.encoder"][:0]
    given = encoded if first else inputs["past.encoder"]
    logits = keys.cumsum(1)[:, -ids.shape[1] :] + given[:, :1]
    return {"logits": logits, "present": present, "present.encoder": encoded}


def returned(axes: dict[str, tuple[str | int, ...]], tokens: int = 60) -> Arrays:
    ids = np.random.default_rng(0).integers(1, 99, (3, tokens))
    sizes = {"batch": 3, "total_len": tokens, "key_len": 4, "past_len": 0}
    numbers = {
        n: np.full([sizes.get(str(a), a) for a in shape], tokens if n in ("lengths", "mask") else 0)
        for n, shape in {**axes, "past.encoder": RETURNED["past.encoder"]}.items()
        if n != "present"
    }
    return {"ids": ids, **numbers} | ({"branch": np.zeros(1, bool)} if "branch" in axes else {})


@pytest.mark.parametrize("axes", [GROWING, FIXED], ids=["growing", "fixed"])
def test_what_a_graph_returns_is_its_next_cache(axes: dict[str, tuple[str | int, ...]]):
    inputs, seen = returned(axes), list[Arrays]()

    def run(inputs: Arrays) -> Arrays:
        seen.append(inputs)
        return sums(inputs)

    outputs = decode_returned(run, inputs, {**RETURNED, **axes}, CACHES)
    for name, array in sums(inputs).items():
        np.testing.assert_array_equal(outputs[name], array)
    assert [x["ids"].shape[1] for x in seen][:9] == [5, 1, 1, 1, 1, 1, 1, 1, 3]
    assert {x["ids"][0, 0] for x in seen} - set(inputs["ids"][0]), "batch elements are reordered"


def test_a_runtime_that_keeps_caches_itself_does_not_see_the_order_of_a_batch():
    inputs, held = returned(GROWING), dict[str, np.ndarray]()

    def run(inputs: Arrays) -> Arrays:
        outputs = sums({**inputs, "past": held.get("present", inputs["past"])})
        held.update(outputs)
        return outputs

    outputs = decode_returned(run, inputs, {**RETURNED, **GROWING}, CACHES)
    assert (outputs["logits"] != sums(inputs)["logits"]).any()


@pytest.mark.parametrize("name", ["logits", "present"])
def test_an_output_of_another_length_than_its_step_is_refused(name: str):
    def run(inputs: Arrays) -> Arrays:
        outputs = sums(inputs)
        if inputs["past"].shape[1] == 20:
            outputs[name] = np.concatenate([outputs[name]] * 2, 1)
        return outputs

    with pytest.raises(
        ValueError, match=rf"{name} is \[.*after 20 tokens, with 1 new ones and a t"
    ):
        decode_returned(run, returned(GROWING), {**RETURNED, **GROWING}, CACHES)
