"""Wrong uses of a `DecodeSession`: the error states the remedy, and the session is unchanged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from decoded import Arrays, Sequence, bundle_of, close, open_session
from hostile.bundles import write_sealed
from hostile.decoding import decode

from attn_export import DecodeSession
from attn_export.errors import AttnExportError, BundleError, RuntimeFailure, UsageError
from attn_export.runtimes.decode_buffers import BoundGraph

GQA, PLAIN = "gqa, rotary, mask", "not causal"
SEQUENCE = Sequence.random(GQA, 2, 12)


def refused(
    error: type[AttnExportError],
    said: str,
    do: Callable[..., object],
    *given: object,
    **named: object,
) -> None:
    with pytest.raises(error, match=said) as caught:
        do(*given, **named)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


# -- the bundle -------------------------------------------------------------------------------


def test_a_bundle_without_such_a_cache_is_refused(bundle: Path):
    refused(UsageError, r'build it with cache = "in-place"', DecodeSession, bundle)


def test_a_dialect_that_is_not_there_is_refused_with_those_that_are():
    said = "no portable graphs; it has ort, standard"
    refused(UsageError, said, DecodeSession, bundle_of(PLAIN), dialect="portable")


@pytest.mark.parametrize("name", ["block", "threads"])
@pytest.mark.parametrize("value", [0, -4, "x", 1.5, 2**40, 2**80, True, [1], np.uint64(2**63)])
def test_numbers_out_of_range_are_refused(name: str, value: object):
    said = f"{name} is .*; give a whole number from 1 to "
    refused(UsageError, said, DecodeSession, bundle_of(GQA), **{name: value})


@pytest.mark.parametrize("name", ["dialect", "device"])
def test_names_of_other_types_are_refused(name: str):
    refused(UsageError, "no .*graphs|unknown device", DecodeSession, bundle_of(GQA),
            **{name: np.zeros(2)})  # fmt: skip
    said = r"no \['ort'\] graphs|unknown device \['ort'\]"
    refused(UsageError, said, DecodeSession, bundle_of(GQA), **{name: ["ort"]})
    refused(UsageError, "give the path", DecodeSession, 5)


def test_two_threads_at_once_are_refused(monkeypatch: pytest.MonkeyPatch):
    session, held = session_with(5), SEQUENCE.reference()["output"][:, 5:6]
    started, ended = threading.Event(), threading.Event()
    run = BoundGraph.run

    def slow(graph: BoundGraph) -> None:
        started.set()
        ended.wait(60)
        run(graph)

    monkeypatch.setattr(BoundGraph, "run", slow)
    with ThreadPoolExecutor(1) as threads:
        step = threads.submit(session.step, **TOKEN)
        started.wait(60)
        for call, given in ((session.step, TOKEN), (session.prefill, TOKEN)):
            refused(UsageError, "another thread uses this session", call, **given)
        refused(UsageError, "another thread uses this session", session.reorder, [0])
        ended.set()
        close(GQA, step.result()["output"], held)


@pytest.mark.parametrize("file", ["model.ort.onnx", "spec.toml", "manifest.json"])
def test_a_damaged_bundle_is_refused(file: str, tmp_path: Path):
    folder = shutil.copytree(bundle_of(GQA), tmp_path / "b")
    with (folder / file).open("ab") as damaged:
        damaged.write(b" ")
    refused(BundleError, f"{file} was changed", DecodeSession, folder)


@pytest.mark.parametrize(
    ("end", "name", "shape"),
    [
        ("inputs", "past_key", ["batch", 2, "past_value", 8]),
        ("inputs", "past_value", ["capacity", 2, "capacity", 8]),
        ("inputs", "past_length", []),
        ("outputs", "output", ["batch", "past_key", 16]),
    ],
)
def test_axes_without_a_size_are_refused(end: str, name: str, shape: list[object], tmp_path: Path):
    folder = shutil.copytree(bundle_of("plain"), tmp_path / "bundle")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest[end][name]["shape"] = shape
    write_sealed(folder, manifest)
    refused(BundleError, "a session cannot tell the sizes of", DecodeSession, folder)


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path):
    refused(UsageError, "is not a bundle", DecodeSession, tmp_path / "nothing")


def test_without_onnx_runtime_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    refused(RuntimeFailure, r"'\.\[cpu\]' in the clone", DecodeSession, bundle_of(GQA))


# -- calls ------------------------------------------------------------------------------------


def session_with(held: int) -> DecodeSession:
    session = open_session(GQA)
    if held:
        session.prefill(**SEQUENCE.piece(0, held))
    return session


def test_a_step_or_an_order_before_the_prompt_is_refused():
    session = session_with(0)
    assert (session.capacity, session.lengths.tolist()) == (0, [])
    refused(UsageError, "call prefill first", session.step, **SEQUENCE.piece(5, 6))
    refused(UsageError, "call prefill first", session.reorder, [0])
    refused(UsageError, "call prefill first", session.fork, [0])
    refused(UsageError, "cannot be forgotten", session.rewind, 1)


@pytest.mark.parametrize("count", [6, -1, [1, 2, 3], 0.5, "1", [6, 0]])
def test_only_tokens_that_are_there_are_rewound(count):
    session = session_with(5)
    refused(UsageError, "cannot be forgotten", session.rewind, count)
    assert session.lengths.tolist() == [5, 5]


def changed(**changes: object) -> dict[str, object]:
    """Return the next token's inputs with some changes; omit those that are None."""
    given = {**SEQUENCE.piece(5, 6), **changes}
    return {name: value for name, value in given.items() if value is not None}


TOKEN = SEQUENCE.piece(5, 6)
WRONG: dict[str, tuple[dict[str, object], str]] = {
    "other batch": (
        {n: np.concatenate([x, x]) for n, x in TOKEN.items()},
        "query has 4 rows, the cache 2; give as many, or call prefill",
    ),
    "no token": (changed(query=np.zeros((2, 0, 32), np.float32)), "which is empty; give one"),
    "no row": (changed(query=np.zeros((0, 1, 32), np.float32)), "which is empty; give one"),
    "two axes": (changed(query=TOKEN["query"][:, 0]), r"query is \[2, 32\]; give \[batch, query"),
    "other width": (
        changed(query=np.zeros((2, 1, 31), np.float32)),
        r"query is \[2, 1, 31\], but should be \[2, 1, 32\]",
    ),
    "float64": (changed(query=TOKEN["query"].astype(np.float64)), "query is float64; give float32"),
    "list of integers": (
        changed(query=TOKEN["query"].astype(np.int64).tolist()), "query is int64; give float32",
    ),
    "ragged": (changed(query=[[[1.0], [1.0, 2.0]]]), "an input is not an array: ValueError"),
    "no mask": (changed(attn_mask=None), "missing input attn_mask; give query, attn_mask"),
    "another input": (
        changed(position_ids=np.zeros((2, 1), np.int64)),
        "unexpected input position_ids; give query",
    ),
    "a cache": (
        changed(past_key=np.zeros((2, 2, 32, 8), np.float32)), "unexpected input past_key; give",
    ),
    "its lengths": (changed(past_length=np.array([5, 5])), "unexpected input past_length; give"),
    "mask too short": (
        changed(attn_mask=TOKEN["attn_mask"][..., :5]),
        r"attn_mask is \[2, 1, 1, 5\], but should be \[2, 1, 1, 6\]",
    ),
    "mask of the capacity": (
        changed(attn_mask=np.ones((2, 1, 1, 32), np.bool_)), r"should be \[2, 1, 1, 6\]",
    ),
    "float mask": (
        changed(attn_mask=TOKEN["attn_mask"].astype(np.float32)), "attn_mask is float32; give bool",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_step_is_refused_and_the_right_one_goes_on(given: dict[str, object], said: str):
    session = session_with(5)
    refused(UsageError, said, session.step, **given)
    assert session.lengths.tolist() == [5, 5]
    close(GQA, session.step(**TOKEN)["output"], SEQUENCE.reference()["output"][:, 5:6])


@pytest.mark.parametrize(
    "lengths",
    [[5], [5, 5, 5], [0, 5], [5, 6], [-1, 5], [2.0, 5.0], [[5, 5]], ["a", 5], [[1], [1, 2]],
     list(range(500)), []],
    ids=lambda x: str(x)[:20],
)  # fmt: skip
def test_wrong_lengths_of_prompts_are_refused_and_what_was_held_stays(lengths: object):
    session = session_with(5)
    said = r"lengths are .*; give 2 whole numbers from 1 to 5, one for each row"
    refused(UsageError, said, session.prefill, **SEQUENCE.piece(0, 5), lengths=lengths)
    assert session.lengths.tolist() == [5, 5]
    close(GQA, session.step(**TOKEN)["output"], SEQUENCE.reference()["output"][:, 5:6])


@pytest.mark.parametrize("more", [-1, "x", 1.5, [1], None, 2**24, 2**80])
def test_tokens_that_cannot_follow_are_refused_before_the_prompt_is_run(more: object):
    session = session_with(5)
    said = "more is .*; give a whole number from 0|there would be .* tokens"
    refused(UsageError, said, session.prefill, **SEQUENCE.piece(0, 5), more=more)
    close(GQA, session.step(**TOKEN)["output"], SEQUENCE.reference()["output"][:, 5:6])


@pytest.mark.parametrize("lengths", [[2, 3], [2, 2]])
def test_padded_prompts_need_causal_attention(lengths: list[int]):
    session, piece = open_session(PLAIN), Sequence.random(PLAIN, 2, 3).piece(0, 3)
    said = "without causal attention .* prompts of one length"
    refused(UsageError, said, session.prefill, **piece, lengths=lengths)
    session.prefill(**piece, lengths=[3, 3])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([0, 2], "rows 0 to 1"), ([-1], "rows 0 to 1"), ([], "give the number"),
        ([0.5], "give the number"), ([True, False], "give the number"), (0, "give the number"),
        ([[0], [1]], "give the number"), ([[0], [1, 0]], "give the number"),
        (list(range(500)), "rows 0 to 1"),
    ],
    ids=lambda x: str(x)[:20],
)  # fmt: skip
def test_rows_that_are_not_there_are_refused(rows: object, said: str):
    session = session_with(5)
    refused(UsageError, said, session.reorder, rows)
    close(GQA, session.step(**TOKEN)["output"], SEQUENCE.reference()["output"][:, 5:6])


def test_an_error_of_onnx_runtime_is_one_line(monkeypatch: pytest.MonkeyPatch):
    session = session_with(5)

    def fail(_: object) -> None:
        raise RuntimeError("it\nfailed")

    session.step(**TOKEN)
    monkeypatch.setattr(
        session._state._graph, "_session", type("S", (), {"run_with_iobinding": fail})()
    )
    session._state._graph._session.run_with_iobinding = fail
    refused(RuntimeFailure, "RuntimeError: it failed", session.step, **SEQUENCE.piece(6, 7))
    monkeypatch.setattr(BoundGraph, "run", fail)
    with pytest.raises(RuntimeError):
        session.prefill(**SEQUENCE.piece(0, 5))
    refused(UsageError, "call prefill first", session.step, **SEQUENCE.piece(0, 1))


@pytest.mark.parametrize("number", range(16))
def test_hostile_arguments_are_one_line_and_spoil_nothing(number: int):
    assert decode(bundle_of("plain"), number)


# -- without torch ----------------------------------------------------------------------------

ALONE = """
import sys
import numpy as np
from attn_export import DecodeSession
session = DecodeSession(sys.argv[1], block=4)
token = np.zeros((2, 1, 32), np.float32)
session.prefill(np.zeros((2, 3, 32), np.float32), lengths=[3, 1])
for _ in range(3):
    session.step(token)
session.reorder([1, 0])
assert session.lengths.tolist() == [4, 6], session.lengths
assert not {"torch", "onnx", "onnx_ir", "rich", "click"} & set(sys.modules)
"""


def test_a_session_decodes_without_torch():
    bundle = bundle_of("mqa, float16")
    code = ALONE.replace("float32", "float16")
    ran = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_inputs_may_be_anything_that_becomes_the_right_array():
    session = session_with(5)
    given: Arrays = {name: np.asfortranarray(array) for name, array in TOKEN.items()}
    given["attn_mask"] = given["attn_mask"].tolist()
    close(GQA, session.step(**given)["output"], SEQUENCE.reference()["output"][:, 5:6])
