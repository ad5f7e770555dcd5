"""The steps of a `DecodeSession` equal one float64 run of the module on the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from decoded import SPECS, Arrays, Sequence, close, open_session

from attn_export import DecodeSession

TOKENS, BLOCK = 210, 32
DIALECTS = {
    "gqa, rotary, mask": ("ort", "standard", "portable"),
    "mqa, window, positions": ("ort", "standard", "portable"),
    "mha, weights, float mask": ("ort", "standard", "portable"),
    "mqa, float16": ("ort", "standard"),
    "learned keys": ("ort",),
    "bfloat16": ("ort",),
    "gqa, window, float16": ("cuda",),
}
EACH = [(name, dialect, 3) for name, dialects in DIALECTS.items() for dialect in dialects]


def stops(tokens: int) -> list[int]:
    """Return the ends of steps: a prompt of 5, single tokens, and occasionally 4 at once."""
    found = [0, 5]
    while found[-1] < tokens:
        found.append(min(found[-1] + (4 if len(found) % 9 == 0 else 1), tokens))
    return found


def go_on(session: DecodeSession, piece: Arrays, *, start: bool) -> Arrays:
    return session.prefill(**piece) if start else session.step(**piece)


@pytest.mark.parametrize(("name", "dialect", "rows"), [*EACH, ("gqa, window, float16", "cuda", 1)])
def test_every_step_is_that_of_the_whole_sequence(
    name: str, dialect: str, rows: int, need: Callable[[str], None]
):
    if dialect == "cuda":
        need(dialect)
    sequence = Sequence.random(name, rows, TOKENS)
    wanted = sequence.reference()
    session = open_session(name, dialect, BLOCK)
    capacities = set()
    for start, stop in pairwise(stops(TOKENS)):
        outputs = go_on(session, sequence.piece(start, stop), start=not start)
        close(name, outputs.pop("output"), wanted["output"][:, start:stop])
        if "attn_weights" in outputs:
            close(name, outputs.pop("attn_weights"), weights_at(name, wanted, start, stop))
        assert outputs == {}
        assert session.lengths.tolist() == [stop] * rows
        capacities.add(session.capacity)
    assert capacities == {BLOCK * n for n in range(1, 8)}, "it grew six times"


def weights_at(name: str, wanted: Arrays, start: int, stop: int) -> np.ndarray:
    """Return the attention weights of some tokens, over the keys so far and the learned keys."""
    rows = wanted["attn_weights"][:, :, start:stop]
    learned = rows.shape[-1] - SPECS[name].added_keys
    return np.concatenate([rows[..., :stop], rows[..., learned:]], axis=-1)


@pytest.mark.parametrize("block", [1, 7, 512])
def test_the_size_of_the_blocks_changes_nothing(block: int):
    name = "gqa, rotary, mask"
    sequence = Sequence.random(name, 2, 30)
    wanted = sequence.reference()["output"]
    session = open_session(name, block=block)
    for start, stop in pairwise([0, 7, 8, 9, 17, 18, 30]):
        got = go_on(session, sequence.piece(start, stop), start=not start)["output"]
        close(name, got, wanted[:, start:stop])
        assert session.capacity == -(-stop // block) * block


@pytest.mark.parametrize("name", ["gqa, rotary, mask", "mqa, window, positions", "learned keys"])
@pytest.mark.parametrize("dialect", ["ort", "standard"])
def test_prompts_of_different_lengths_are_rows_of_their_own(name: str, dialect: str):
    prompts, steps = np.array([9, 1, 4, 30]), 40
    sequence = Sequence.random(name, 4, int(prompts.max()) + steps)
    wanted = [alone(sequence, row) for row in range(4)]
    session = open_session(name, dialect, BLOCK)
    longest = int(prompts.max())
    got = session.prefill(**sequence.piece(0, longest), lengths=prompts.tolist())["output"]
    for row, length in enumerate(prompts):
        close(name, got[row, :length], wanted[row][:length])
    for _ in range(steps):
        held = session.lengths
        got = session.step(**of_rows(sequence, held))["output"]
        for row, length in enumerate(held):
            close(name, got[row, 0], wanted[row][length])
    assert session.lengths.tolist() == (prompts + steps).tolist()


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("gqa, rotary, mask", "ort"), ("gqa, rotary, mask", "standard"),
     ("mha, weights, float mask", "ort"), ("mha, weights, float mask", "portable"),
     ("bfloat16", "ort")],
)  # fmt: skip
@pytest.mark.parametrize("value", [np.nan, 3e38])
@pytest.mark.every(2)
def test_values_in_padding_change_nothing(name: str, dialect: str, value: float):
    prompts = np.array([1, 4, 2])
    sequence = Sequence.random(name, 3, 12)
    session = open_session(name, dialect, BLOCK)
    outputs = []
    for padding in (0, value):
        rows = []
        piece = with_padding(sequence.piece(0, 4), prompts, padding)
        first = session.prefill(**piece, lengths=prompts.tolist())["output"]
        rows += [first[row, :length] for row, length in enumerate(prompts)]
        for _ in range(5):
            held = session.lengths
            piece = with_padding(of_rows(sequence, held), held + 1, padding)
            rows.append(session.step(**piece)["output"])
        outputs.append(rows)
    for wanted, got in zip(*outputs, strict=True):
        np.testing.assert_array_equal(got, wanted)


def with_padding(piece: Arrays, ends: np.ndarray, value: float) -> Arrays:
    """Return inputs with a value in padding of queries, and of keys of a mask of numbers."""
    found = {name: array.copy() for name, array in piece.items()}
    for row, end in enumerate(ends):
        if found["query"].shape[1] > 1:
            found["query"][row, end:] = value
        if found.get("attn_mask", np.zeros(0, bool)).dtype != np.bool_:
            found["attn_mask"][row, ..., end:] = value
            found["attn_mask"][row, :, end:] = value
    return found


def alone(sequence: Sequence, row: int) -> np.ndarray:
    one = {name: array[row : row + 1] for name, array in sequence.inputs.items()}
    return Sequence(sequence.name, one).reference()["output"][0]


def of_rows(sequence: Sequence, held: np.ndarray) -> Arrays:
    """Return the next token of each batch element, with a mask for the largest number of keys."""
    rows = np.arange(len(held))
    found = {n: x[rows, held][:, None] for n, x in sequence.inputs.items() if n != "attn_mask"}
    if "attn_mask" in sequence.inputs:
        mask = sequence.inputs["attn_mask"][..., : int(held.max()) + 1]
        found["attn_mask"] = mask[rows, :, held][:, :, None] if mask.shape[2] > 1 else mask
    return found


def test_a_session_starts_anew_with_another_batch():
    name = "gqa, rotary, mask"
    session = open_session(name)
    session.prefill(**Sequence.random(name, 3, 40).piece(0, 40))
    again = Sequence.random(name, 2, 12, seed=1)
    wanted = again.reference()["output"]
    close(name, session.prefill(**again.piece(0, 11))["output"], wanted[:, :11])
    close(name, session.step(**again.piece(11, 12))["output"], wanted[:, 11:])
    assert session.capacity == 32


def test_without_causal_attention_tokens_see_what_came_before_and_with_them():
    name = "not causal"
    sequence = Sequence.random(name, 2, 9)
    session = open_session(name, "standard", 4)
    for start, stop in ((0, 4), (4, 5), (5, 9)):
        got = go_on(session, sequence.piece(start, stop), start=not start)["output"]
        wanted = Sequence(name, sequence.piece(0, stop)).reference()["output"][:, start:]
        close(name, got, wanted)
