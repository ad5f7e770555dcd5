"""The C library and its bindings in C++, Rust, Go, Java and C#, as a user has them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from library_kits import (
    BINDINGS,
    CallError,
    Library,
    binding_kit,
    check_program,
    compile_cpp,
    fuzzed,
    library_kit,
    program,
    run,
    shell,
)
from native_corpus import FILES, Broken, broken_bundles, broken_copy
from readmes import blocks, commands
from test_native_kits import SANITIZERS, cases_of, need_sanitizers, sanitized_kit, small_bundle
from test_native_kits import run as run_sanitized

from attn_export import DecodeSession
from attn_export.parts.kits.kit import LANGUAGES

HEADER = Path(__file__).parents[3] / "attn_export/parts/kits/sources/c/src/attn_export.h"
MOST_GROWN = {"cpp": 2048, "rust": 2048, "go": 4096, "java": 24576, "csharp": 4096}
"""KiB of memory that 10,000 steps may add: machines that collect garbage grow by themselves."""


@pytest.fixture(autouse=True)
def _here(need) -> None:
    need("c")


@pytest.fixture(params=BINDINGS)
def language(request: pytest.FixtureRequest, need) -> str:
    need(request.param)
    return str(request.param)


# -- bindings ----------------------------------------------------------------------------------


def test_the_commands_of_its_readme_build_and_test_it(language: str):
    kit = binding_kit(language)
    assert commands(kit) == list(LANGUAGES[language].test)
    passed = shell(library_kit("in-place"), commands(library_kit("in-place"))[-1])
    assert passed.stdout.count("ok   ") == 3
    assert shell(kit, commands(kit)[-1]).stdout == passed.stdout


def test_the_other_commands_of_its_readme_run(language: str):
    kit = binding_kit(language)
    query = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)
    np.save(kit / "query.npy", query)
    _, example, decode = blocks(kit, "sh")
    shell(kit, example)
    assert " ms per token" in shell(kit, decode).stdout
    output = np.load(kit / "output.npy")
    session = DecodeSession(kit / "bundle", threads=1)
    positions = np.arange(5, dtype=np.int64)[None].repeat(4, 0)
    reference = session.prefill(query[[0, 1, 2, 0]], position_ids=positions)["output"]
    np.testing.assert_allclose(output, reference, atol=1e-5)


def test_the_program_in_the_readme_in_cpp_runs(need, tmp_path: Path):
    need("cpp")
    kit = binding_kit("cpp")
    (program,) = blocks(kit, "cpp")
    (tmp_path / "mine.cpp").write_text(program)
    compile_cpp(tmp_path / "mine.cpp", tmp_path / "mine", kit / "build" / "library")
    done = run(kit, [tmp_path / "mine"])
    sizes = re.findall(r"input1\((.*)\)", program)[0].split(" * ")  # those of the output, too
    assert (done.stdout, done.stderr) == (f"{np.prod([*map(int, sizes)])} elements\n", "")


def test_the_program_in_cpp_touches_no_memory_of_others(
    need, tmp_path: Path, request: pytest.FixtureRequest
):
    need("cpp")
    need_sanitizers(request, tmp_path)
    library, bundle = sanitized_kit("in-place") / "build", small_bundle("in-place")
    source, program = binding_kit("cpp") / "attn.cpp", tmp_path / "attn"
    compile_cpp(source, program, library, *SANITIZERS.split(), f'-DBUNDLE_FOLDER="{bundle}"')
    query = tmp_path / "query.npy"
    np.save(query, np.ones((2, 3, 16), np.float32))
    whole = query.read_bytes()
    for words, code in (
        (["self-test"], 0), (["decode", "70"], 0), (["run", query, "3", tmp_path / "o.npy"], 0),
        (["generate", "1,2", "3"], 2),
    ):  # fmt: skip
        assert run_sanitized(program, *words).returncode == code
    for size in (0, 5, 11, 60, 127, 128, len(whole) - 1):
        query.write_bytes(whole[:size])
        done = run_sanitized(program, "run", query, "3", tmp_path / "o.npy")
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


@pytest.mark.parametrize("words", [["run", "no.npy", "1", "o.npy"], ["decode", "x"], ["walk"], []])
def test_wrong_words_are_one_line(words: list[str], language: str):
    done = run(binding_kit(language), [*program(language), *words])
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_what_goes_wrong_is_an_error_of_the_language(language: str, tmp_path: Path):
    bundle = small_bundle("in-place")
    every = [one for one in broken_bundles(bundle, cases_of(bundle)[0]) if "golden" in one.name][
        ::3
    ]
    graph = "model.ort.onnx"  # which ONNX Runtime refuses if it is cut
    every += [
        Broken(what, lambda folder, what=what: FILES[what](folder / graph))
        for what in ("nothing", "a pipe", "cut in its first field")
    ]
    assert len(every) >= 20
    folders = [broken_copy(bundle, tmp_path / str(i), one) for i, one in enumerate(every)]
    done = run(binding_kit(language), [*check_program(language), bundle, *folders])
    assert (done.returncode, done.stderr) == (0, "")
    *facts, grown = [line.split(": ", 1) for line in done.stdout.splitlines()]
    wanted = {
        "step without a prefill": "5", "wrong size": "2", "wrong bytes": "2", "wrong type": "2",
        "wrong row": "2", "output before a run": "5", "closed": "3 3", "broken": "6",
        "two threads agree": "true", "other codes of one session in two threads": "0",
        "copied": "0",
    }  # fmt: skip
    assert facts.pop([name for name, _ in facts].index("broken") + len(every) - 1)[1] == "7"
    assert [(name, says) for name, says in facts if says != wanted[name]] == []
    assert [name for name, _ in facts].count("broken") == len(every) - 1
    assert int(grown[1]) <= MOST_GROWN[language]


def test_a_library_of_another_version_is_refused(language: str, tmp_path: Path):
    names = set(re.findall(r"\b(attn_\w+)\(", HEADER.read_text())) - {"attn_last_error"}
    code = "".join(f"int {name}(void) {{ return 9; }}\n" for name in sorted(names))
    says = "the program is for version 2"
    (tmp_path / "a.c").write_text(f'{code}char *attn_last_error(void) {{ return "{says}"; }}\n')
    library = tmp_path / "library" / "build" / "libattn_export.so"
    library.parent.mkdir(parents=True)
    assert run(tmp_path, ["cc", "-shared", "-fPIC", "a.c", "-o", library]).returncode == 0
    if language == "csharp":
        for path in (binding_kit(language) / "attn.exe", library):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    done = run(tmp_path, [*program(language), "self-test"], LD_LIBRARY_PATH=str(library.parent))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{says}\n"


# -- the library -------------------------------------------------------------------------------


def prefilled(library: Library, bundle: int, query: np.ndarray, *more: object) -> int:
    session = library.made("session", bundle)
    library.set_input(session, "query", query)
    library.call("prefill", session, *(more or (16, None, 0)))
    return session


@pytest.mark.parametrize("name", ["in-place", "append"])
def test_steps_rewinds_and_forks_give_what_one_prefill_gives(name: str):
    library, query = Library(name), np.random.default_rng(1).random((2, 6, 16), np.float32)
    first, second, last = (np.ascontiguousarray(query[:, at]) for at in np.split(range(6), [3, 5]))
    with library.open() as bundle:
        whole = library.output(prefilled(library, bundle, query))
        session = prefilled(library, bundle, first)
        copied = library.get(session, 17)
        for tokens in (second, last):
            library.set_input(session, "query", tokens)
            library.call("step", session)
        np.testing.assert_allclose(library.output(session), whole[:, 5:], atol=1e-6)
        assert (copied, library.get(session, 17), library.get(session, 16)) == (0, 0, 6)
        library.call("rewind", session, 3)
        rows = np.array([1, 0, 1])
        fork = library.made("fork", session, rows.ctypes.data_as(np.ctypeslib.ctypes.c_void_p), 3)
        library.call("close", session)
        rest = np.ascontiguousarray(query[rows, 3:])
        library.set_input(fork, "query", rest)
        library.call("step", fork)
        np.testing.assert_allclose(library.output(fork), whole[rows, 3:], atol=1e-6)


def test_rows_of_unlike_lengths_give_what_each_alone_gives():
    library, query = Library("in-place"), np.random.default_rng(2).random((2, 4, 16), np.float32)
    lengths, step = np.array([2, 4]), np.full((2, 1, 16), 0.5, np.float32)
    with library.open() as bundle:
        pointer = lengths.ctypes.data_as(np.ctypeslib.ctypes.c_void_p)
        session = prefilled(library, bundle, query, 8, pointer, 2)
        library.set_input(session, "query", step)
        library.call("step", session)
        together = library.output(session).copy()
        for row, length in enumerate(lengths):
            alone = prefilled(library, bundle, np.ascontiguousarray(query[row : row + 1, :length]))
            library.set_input(alone, "query", step[:1])
            library.call("step", alone)
            np.testing.assert_allclose(library.output(alone)[0], together[row], atol=1e-6)
    with Library("append").open() as bundle, pytest.raises(CallError, match="unlike lengths"):
        prefilled(Library("append"), bundle, query, 0, pointer, 2)


def test_a_cache_in_place_stays_where_it_is_and_ones_own_is_written():
    library, query = Library("in-place"), np.ones((1, 1, 16), np.float32)
    with library.open() as bundle:
        inputs, key = library.values(bundle, 0), "present_key"
        session = prefilled(library, bundle, query)
        at = library.output(session, key).ctypes.data
        for _ in range(5):
            library.call("step", session)
            assert library.output(session, key).ctypes.data == at
        own = library.made("session", bundle)
        shape = library.output(session, key).shape
        arrays = {
            "query": query, "past_length": np.zeros(1, np.int64),
            "position_ids": np.zeros((1, 1), np.int64),
        }  # fmt: skip
        arrays |= {name: np.zeros(shape, np.float32) for name in ("past_key", "past_value")}
        for name in inputs:
            library.set_input(own, name, arrays[name])
        library.call("run", own)
        assert library.output(own, key).ctypes.data == arrays["past_key"].ctypes.data
        assert arrays["past_key"].any()


def test_libraries_of_two_bundles_share_a_process():
    libraries = [Library(name) for name in ("in-place", "append")]
    with libraries[0].open() as one, libraries[1].open() as other:
        values = [
            library.values(bundle, 0)
            for library, bundle in zip(libraries, (one, other), strict=True)
        ]
    assert ["attn_mask" in names for names in values] == [False, True]


@pytest.mark.parametrize(
    ("code", "says", "wrong"),
    [
        (9, "the program is for version 1", lambda lib: lib.made("open", 1, b"x", None, 0, 0)),
        (6, "nowhere/", lambda lib: lib.made("open", 2, b"/nowhere", None, 0, 0)),
        (7, "cannot be loaded", lambda lib: lib.made("open", 2, b"x", b"/nowhere.so", 0, 0)),
        (7, "is not ONNX Runtime", lambda lib: lib.made("open", 2, b"x", b"libm.so.6", 0, 0)),
        (3, "77 is no open bundle", lambda lib: lib.made("session", 77)),
    ],
)  # fmt: skip
def test_wrong_calls_have_a_code_and_a_line(code: int, says: str, wrong):
    with pytest.raises(CallError, match=says) as error:
        wrong(Library("append"))
    assert error.value.code == code


def test_calls_at_random_are_no_crash(tmp_path: Path, request: pytest.FixtureRequest):
    need_sanitizers(request, tmp_path)
    assert fuzzed(sanitized_kit("in-place"), seed=1, calls=1500)[3] > 0
