"""The buffers of a `DecodeSession`: they are written in place, grown and reordered."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from decoded import Arrays, Sequence, bundle_of, close, open_session
from hostile.bundles import copied, replaced, write_sealed
from shared import extended

from attn_export import DecodeSession
from attn_export.errors import RuntimeFailure

GQA = "gqa, rotary, mask"
IN_PLACE = [
    GQA,
    "mha, weights, float mask",
    "mqa, float16",
    "mqa, window, positions",
    "learned keys",
]
"""Whose graphs write both caches into the buffers of their inputs."""


def buffers(session: DecodeSession) -> Arrays:
    assert session._state.caches is not None
    return session._state.caches._arrays


def addresses(session: DecodeSession) -> list[int]:
    return [array.__array_interface__["data"][0] for array in buffers(session).values()]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("dialect", extended(["ort", "standard"], lambda name: name == "ort"))
@pytest.mark.every(3)
def test_no_step_copies_the_cache_and_each_writes_into_it(name: str, dialect: str):
    sequence = Sequence.random(name, 2, 96)
    wanted = sequence.reference()
    session = open_session(name, dialect, 32)
    session.prefill(**sequence.piece(0, 5))
    at, moves = addresses(session), 0
    for start in range(5, 96):
        before = {past: array.copy() for past, array in buffers(session).items()}
        session.step(**sequence.piece(start, start + 1))
        if start % 32:
            assert addresses(session) == at
        else:
            assert addresses(session) != at
            at, moves = addresses(session), moves + 1
        assert not session._state._graph.outputs.keys() & {"present_key", "present_value"}
        for past, held in before.items():
            written = usual(session, past, buffers(session)[past])
            close(name, written[:, :, start], wanted[past.replace("past", "present")][:, :, start])
            np.testing.assert_array_equal(
                written[:, :, :start], usual(session, past, held)[:, :, :start]
            )
            assert not written[:, :, start + 1 :].any()
    assert moves == 2


def usual(session: DecodeSession, name: str, array: np.ndarray) -> np.ndarray:
    """Return a buffer with its axes as `[B, Hkv, S, D]`."""
    return array.transpose(np.argsort(session._state._sessions[0][0].layouts.get(name, range(4))))


def test_a_graph_that_gives_new_buffers_has_them_copied():
    name = "learned keys"
    sequence = Sequence.random(name, 2, 20)
    session = open_session(name)
    session.prefill(**sequence.piece(0, 19))
    session.step(**sequence.piece(19, 20))
    for past, array in buffers(session).items():
        close(name, array[:, :, :20], sequence.reference()[past.replace("past", "present")])


@pytest.mark.parametrize("name", [GQA, "mha, weights, float mask"])
def test_returned_arrays_and_inputs_of_a_step_are_not_changed(name: str):
    sequence = Sequence.random(name, 2, 12)
    session = open_session(name)
    session.prefill(**sequence.piece(0, 5))
    given = {n: array.copy() for n, array in sequence.piece(5, 6).items()}
    kept = {n: array.copy() for n, array in given.items()}
    first = session.step(**given)
    copies = {n: array.copy() for n, array in first.items()}
    own = [*session._state._graph.inputs.values(), *session._state._graph.outputs.values()]
    for array in (*first.values(), *given.values()):
        assert not any(np.shares_memory(array, buffer) for buffer in own)
    for n, array in given.items():
        np.testing.assert_array_equal(array, kept[n])
        array[...] = 0
    for start in range(6, 12):
        second = session.step(**sequence.piece(start, start + 1))
    for n, array in first.items():
        np.testing.assert_array_equal(array, copies[n])
        assert array.flags.writeable
    close(name, second["output"], sequence.reference()["output"][:, 11:])


# -- beam search ------------------------------------------------------------------------------


@dataclasses.dataclass
class Beams:
    """Inputs of each row so far."""

    name: str
    queries: np.ndarray
    shown: np.ndarray

    def reorder(self, rows: list[int]) -> None:
        self.queries, self.shown = self.queries[rows], self.shown[rows]

    def extend(self, rng: np.random.Generator) -> Arrays:
        """Append a random token to each row."""
        rows = len(self.queries)
        token = rng.standard_normal((rows, 1, 32)).astype(np.float32)
        self.queries = np.concatenate([self.queries, token], axis=1)
        self.shown = np.concatenate([self.shown, rng.random((rows, 1)) < 0.7], axis=1)
        return {"query": token, "attn_mask": self.mask}

    @property
    def mask(self) -> np.ndarray:
        return self.shown[:, None, None]

    def last(self) -> np.ndarray:
        """Return the output of each row at its last token, decoded alone."""
        return np.concatenate([
            Sequence(self.name, {"query": q[None], "attn_mask": m[None]})
            .reference()["output"][:, -1:]
            for q, m in zip(self.queries, self.mask, strict=True)
        ])  # fmt: skip


@pytest.mark.parametrize("dialect", ["ort", "portable"])
def test_beams_go_on_as_if_each_were_alone(dialect: str):
    rng = np.random.default_rng(5)
    prompt = rng.standard_normal((1, 6, 32)).astype(np.float32)
    beams = Beams(GQA, prompt, np.ones((1, 6), np.bool_))
    session = open_session(GQA, dialect, block=8)
    session.prefill(prompt, attn_mask=beams.mask)
    # Fanned out, duplicated and dropped, exchanged, fewer, and one again; growing in between.
    for rows in ([0, 0, 0], [2, 0, 0, 1], [3, 2, 1, 0], [1, 1], [1, 0], [0]):
        session.reorder(rows)
        beams.reorder(rows)
        assert session.lengths.tolist() == [beams.queries.shape[1]] * len(rows)
        for _ in range(3):
            close(GQA, session.step(**beams.extend(rng))["output"], beams.last())
    assert session.capacity == 24


def test_rows_keep_their_own_lengths_when_they_are_reordered():
    sequence = Sequence.random(GQA, 3, 12)
    wanted = sequence.reference()["output"]
    session = open_session(GQA)
    session.prefill(**sequence.piece(0, 9), lengths=[9, 2, 5])
    session.reorder(np.array([1, 2, 1]))
    assert session.lengths.tolist() == [2, 5, 2]
    query = np.stack([sequence.inputs["query"][row, at] for row, at in ((1, 2), (2, 5), (1, 2))])
    mask = sequence.inputs["attn_mask"][[1, 2, 1], ..., :6]
    got = session.step(query[:, None], attn_mask=mask)["output"]
    close(GQA, got[:, 0], np.stack([wanted[1, 2], wanted[2, 5], wanted[1, 2]]))


def test_caches_of_other_names_are_found_by_the_pairs_of_the_manifest(tmp_path: Path):
    names = {
        "past_key": "k.0", "past_value": "v.0", "present_key": "k.0.new",
        "present_value": "v.0.new",
    }  # fmt: skip
    folder = copied(bundle_of(GQA), tmp_path / "renamed")
    for path in folder.glob("*.onnx"):
        model = ir.load(path)
        for value in (*model.graph.inputs, *model.graph.outputs):
            value.name = names.get(str(value.name), value.name)
        replaced(folder, path.name, ir.serde.serialize_model(model).SerializeToString())
    text = (folder / "manifest.json").read_text()
    for name, other in names.items():
        text = text.replace(f'"{name}"', f'"{other}"')
    caches = {"k.0.new": "k.0", "v.0.new": "v.0"}
    write_sealed(folder, {**json.loads(text), "caches": caches})
    sequence, session = Sequence.random(GQA, 2, 6), DecodeSession(folder, block=32, threads=1)
    first = session.prefill(**sequence.piece(0, 4))
    assert set(first) == {"output"}
    for start in (4, 5):
        output = session.step(**sequence.piece(start, start + 1))["output"]
        close(GQA, output, sequence.reference()["output"][:, start : start + 1])
    assert set(buffers(session)) == {"k.0", "v.0"}


# -- rewound and forked -----------------------------------------------------------------------


def test_tokens_that_are_rewound_leave_no_trace():
    sequence, drafts = (Sequence.random(GQA, 2, 12, seed=seed) for seed in (0, 1))
    reference, session = sequence.reference()["output"], open_session(GQA)
    session.prefill(**sequence.piece(0, 8), lengths=[8, 7])
    session.step(**drafts.piece(8, 12))
    session.rewind([4, 3])
    assert session.lengths.tolist() == [8, 8]
    session.rewind(1)
    assert session.lengths.tolist() == [7, 7]
    # The draft that the second element kept gives way to the token that belongs there.
    close(GQA, session.step(**sequence.piece(7, 8))["output"], reference[:, 7:8])


def test_a_fork_and_its_source_do_not_share_their_tokens():
    sequence, others = (Sequence.random(GQA, 2, 12, seed=seed) for seed in (0, 1))
    reference, session = sequence.reference()["output"], open_session(GQA)
    session.prefill(**sequence.piece(0, 8))
    fork = session.fork([1, 0])
    fork.step(**others.piece(8, 12))
    close(GQA, session.step(**sequence.piece(8, 9))["output"], reference[:, 8:9])
    fork.rewind(4)
    swapped = {name: array[::-1] for name, array in sequence.piece(8, 9).items()}
    close(GQA, fork.step(**swapped)["output"], reference[::-1, 8:9])
    assert (session.lengths.tolist(), fork.lengths.tolist()) == ([9, 9], [9, 9])


def test_a_session_goes_on_after_there_was_no_memory_for_its_caches():
    sequence = Sequence.random(GQA, 2, 40)
    session = open_session(GQA, "ort", 32)
    session.prefill(**sequence.piece(0, 32))
    with pytest.raises(RuntimeFailure, match="not enough memory"), session._alone():
        session._state.caches.grow(2**55)
    assert session.capacity == 32
    output = session.step(**sequence.piece(32, 33))["output"]
    close(GQA, output, sequence.reference()["output"][:, 32:33])
