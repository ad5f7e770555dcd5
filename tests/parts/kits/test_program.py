"""Valid and invalid output of programs in other languages."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from attn_export.parts.kits.program import ProgramEngine
from attn_export.runtimes.protocol import EngineDiedError
from attn_export.tensorfile import numpy_dtype

ECHO = """
import sys
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
def say(data):
    stdout.write(data)
    stdout.flush()
facts = tuple(word.encode() for word in sys.argv[-2:])
say(b'loaded {"version": "1", "graph": "%s", "threads": "%s"}\\n' % facts)
SIZES = {1: 4, 7: 8, 9: 1, 10: 2, 16: 2}
while line := stdin.readline():
    word, inputs, bound = line.split()
    tensors = []
    for _ in range(int(inputs)):
        head = stdin.readline()
        dtype, rank, rest = head.split(b" ", 2)
        dims = rest.split(b" ", int(rank))[:-1]
        size = SIZES[int(dtype)]
        for dim in dims:
            size *= int(dim)
        tensors.append(head + stdin.read(size))
    pairs = [stdin.readline() for _ in range(int(bound))]
    say(b"outputs %d\\n" % len(tensors) + b"".join(tensors))
    sys.stderr.write(repr(pairs))
"""


def program(tmp_path: Path, source: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(source)
    return [sys.executable, "-S", str(path)]


def test_tensors_of_every_type_and_rank_come_back_as_they_went(tmp_path: Path):
    sent = {
        "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a name with spaces": np.array([[True, False]]),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "narrow": np.array([1.5, -2.0]).astype(numpy_dtype("bfloat16")),
        "not contiguous": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    }
    engine = ProgramEngine(program(tmp_path, ECHO), Path("g.onnx"), 2)
    assert engine.facts() == {"version": "1", "graph": "g.onnx", "threads": "2"}
    for _ in range(2):
        got = engine.run(sent, {"present": "past"})
        assert list(got) == list(sent)
        for name, array in sent.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array)


DEATHS = {
    "print('hello')": "said 'hello' where 'loaded' was due",
    "pass": "ended: exit code 0",
    "import sys; sys.exit(3)": "ended: exit code 3",
    "import os; os.kill(os.getpid(), 11)": "ended: signal 11",
    "print('loaded', 'nonsense')": "said 'nonsense' of itself",
    "import sys; sys.stdout.buffer.write(b'\\xff' * 100000)": "without an end",
    "print('loaded {}', flush=True); input(); print('outputs many')": "said 'many' where a number",
    "print('loaded {}', flush=True); input(); print('outputs 1'); print('x')": "where a tensor",
    "print('loaded {}', flush=True); input(); print('outputs 1'); print('99 0 x')": "a tensor was",
    "print('loaded {}', flush=True); input(); print('outputs 1'); print('1 1 4 x'); print('ab')":
        "stopped within x",
    "print('loaded {}', flush=True); import os; os.kill(os.getpid(), 9)": "signal 9",
}  # fmt: skip


@pytest.mark.parametrize(("source", "says"), DEATHS.items(), ids=DEATHS.values())
def test_a_program_that_dies_or_talks_nonsense_is_one_line(source: str, says: str, tmp_path: Path):
    with pytest.raises(EngineDiedError) as caught:
        ProgramEngine(program(tmp_path, source), Path("g.onnx"), 1).run({"x": np.zeros(3)}, {})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refusal_is_the_text_of_the_program_which_goes_on(tmp_path: Path):
    source = (
        "print('loaded {}', flush=True)\n"
        "for line in iter(input, ''):\n"
        "    print('error no such operator', flush=True)\n"
    )
    engine = ProgramEngine(program(tmp_path, source), Path("g.onnx"), 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^no such operator$"):
            engine.run({}, {})


def test_a_graph_that_is_refused_is_no_death(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"^cannot read it$"):
        ProgramEngine(program(tmp_path, "print('error cannot read it')"), Path("g.onnx"), 1)


def test_a_name_that_would_break_a_line_is_refused(tmp_path: Path):
    engine = ProgramEngine(program(tmp_path, ECHO), Path("g.onnx"), 1)
    with pytest.raises(ValueError, match="holds a newline or a tab"):
        engine.run({"a\nb": np.zeros(1, np.float32)}, {})
