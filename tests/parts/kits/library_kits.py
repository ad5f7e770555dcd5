"""Shared parts of the tests of the C library and its bindings: kits, and the library in ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from native_kits import DIALECT, call
from readmes import commands
from shared import once
from test_native_kits import SANITIZERS, small_bundle
from test_native_kits import run as run_sanitized

from attn_export.parts.installing import home
from attn_export.parts.kits.kit import ORT_PLACEHOLDER, write_kit
from attn_export.tensorproto import CODES, DTYPES

BINDINGS = ("cpp", "rust", "go", "java", "csharp")
ENVIRONMENT = {**os.environ, "CARGO_NET_OFFLINE": "true", "GOFLAGS": "-mod=mod", "GOPROXY": "off"}
FUZZ = Path(__file__).with_name("fuzz_abi.c")
CHECKS = Path(__file__).with_name("bindings")
"""Programs that say what the library gives to a program in each language."""


def dialect_of(name: str) -> str | None:
    return None if name == "in-place" else DIALECT


def library_kit(name: str) -> Path:
    """Return the kit of the library of a small bundle, built as its README says."""

    def make(kit: Path) -> None:
        write_kit("library", small_bundle(name), kit, dialect_of(name))
        for command in commands(kit)[:-1]:
            shell(kit, f"CFLAGS=-Werror {command}")

    return once(f"kits/library-{name}", make)


def binding_kit(language: str) -> Path:
    """Return the kit of a binding, built as its README says, with a library that is built once."""

    def make(kit: Path) -> None:
        write_kit(language, small_bundle("in-place"), kit)
        *others, _ = commands(kit)
        if language != "cpp":  # whose project has that of the library
            (kit / "library" / "build").symlink_to(library_kit("in-place") / "build")
            assert [each.split()[1] for each in others[:2]] == ["-S", "--build"]
            del others[:2]
        for command in others:
            shell(kit, f"CXXFLAGS=-Werror {command}")

    return once(f"kits/{language}", make)


def shell(kit: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a README in the folder of the kit; it must succeed."""
    text = command.replace(ORT_PLACEHOLDER, str(home() / "onnxruntime"))
    done = run(kit, ["sh", "-c", text])
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run(
    kit: Path, command: Sequence[str | Path], **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, command)], cwd=kit, env=ENVIRONMENT | variables, capture_output=True, text=True
    )


def program(language: str) -> list[str]:
    """Return the command of the program of a binding, in whatever folder of a kit."""
    kit = binding_kit(language)
    return {
        "cpp": [f"{kit}/build/attn"],
        "rust": [f"{kit}/target/release/attn"],
        "go": [f"{kit}/attn"],
        "java": ["java", "-Xshare:auto", "-cp", f"{kit}/build:/usr/share/java/jna.jar", "Attn"],
        "csharp": ["mono", "attn.exe"],
    }[language]


def check_program(language: str) -> list[str]:
    """Return the command of the program in `CHECKS`, made in the folder of the kit."""
    kit = binding_kit(language)
    named = {"rust": "check.rs", "java": "Check.java", "csharp": "Check.cs"}
    source = CHECKS / named.get(language, f"check.{language}")

    def make(folder: Path) -> None:
        folder.mkdir()
        if language == "cpp":
            compile_cpp(source, folder / "check", kit / "build" / "library", "-pthread")
        elif language == "rust":
            (kit / "examples").mkdir()
            (kit / "examples" / source.name).symlink_to(source)
            call("cargo", "build", "--release", "--offline", "--example", "check", cwd=kit)
        elif language == "go":
            for name in ("go.mod", "attnexport", "library"):
                (folder / name).symlink_to(kit / name)
            (folder / source.name).write_text(source.read_text())
            call("go", "build", "-o", "check", ".", cwd=folder)
        elif language == "java":
            paths = f"{kit}/build:/usr/share/java/jna.jar"
            call("javac", "-Xlint:all", "-Werror", "-d", folder, "-cp", paths, source, cwd=kit)
        else:
            call(
                "mcs", "-warnaserror", f"-out:{folder}/check.exe", "AttnExport.cs", source, cwd=kit
            )
            (folder / "libattn_export.so").symlink_to(kit / "libattn_export.so")

    made = once(f"checks/{language}", make)
    return {
        "cpp": [f"{made}/check"],
        "rust": [f"{kit}/target/release/examples/check"],
        "go": [f"{made}/check"],
        "java": ["java", "-cp", f"{made}:{kit}/build:/usr/share/java/jna.jar", "Check"],
        "csharp": ["mono", f"{made}/check.exe"],
    }[language]


def compile_cpp(source: Path, program: Path, library: Path, *flags: str) -> None:
    """Compile a program in C++ with the library in a folder; a warning is an error."""
    kit = binding_kit("cpp")
    call(
        "c++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", *flags, f"-I{kit}",
        f"-I{kit}/library/src", source, f"-L{library}", f"-Wl,-rpath,{library}", "-lattn_export",
        "-o", program, cwd=kit,
    )  # fmt: skip


# -- random calls ---------------------------------------------------------------------------------


def fuzzed(kit: Path, seed: int, calls: int) -> dict[int, int]:
    """Return how often each code came in random calls; a sanitizer must find nothing."""

    def make(folder: Path) -> None:
        folder.mkdir()
        built = run(folder, [
            "cc", "-std=c11", "-Wall", "-Wextra", "-Werror", *SANITIZERS.split(), f"-I{kit}/src",
            FUZZ, f"-L{kit}/build", f"-Wl,-rpath,{kit}/build", "-lattn_export", "-o", "fuzz",
        ])  # fmt: skip
        assert built.returncode == 0, built.stderr

    folder = once(f"fuzz-abi/{kit.name}", make)
    done = run_sanitized(folder / "fuzz", kit / "bundle", str(seed), str(calls), seconds=600)
    assert (done.returncode, done.stderr) == (0, b"")
    return {int(code): int(n) for code, n in re.findall(r"(\d+):(\d+)", done.stdout.decode())}


# -- the library in this process ---------------------------------------------------------------


class _Value(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("dtype", ctypes.c_int32), ("element_bytes", ctypes.c_int32),
        ("needed", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * 8),
        ("axes", ctypes.c_char_p * 8), ("data", ctypes.c_void_p), ("bytes", ctypes.c_int64),
    ]  # fmt: skip


class CallError(Exception):
    """A call gave another code than 0."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Library:
    """The library of a small bundle, or of a kit; `call` raises an error for its codes."""

    def __init__(self, name: str | Path) -> None:
        kit = library_kit(name) if isinstance(name, str) else name
        self._c = ctypes.CDLL(str(kit / "build" / "libattn_export.so"))
        self._c.attn_last_error.restype = ctypes.c_char_p
        self.folder = kit / "bundle"

    def call(self, name: str, *values: object) -> None:
        given = [ctypes.c_int64(v) if isinstance(v, int) else v for v in values]
        code = getattr(self._c, f"attn_{name}")(*given)
        if code:
            raise CallError(code, self._c.attn_last_error().decode())

    def made(self, name: str, *values: object) -> int:
        """Return the handle that a function makes."""
        handle = ctypes.c_uint64()
        self.call(name, *values, ctypes.byref(handle))
        return handle.value

    @contextlib.contextmanager
    def open(self, folder: Path | None = None, abi: int = 2) -> Iterator[int]:
        path = str(folder or self.folder).encode()
        bundle = self.made("open", abi, path, None, 1, 0)
        yield bundle
        self.call("close", bundle)

    def get(self, handle: int, what: int) -> int:
        value = ctypes.c_int64()
        self.call("get", handle, what, ctypes.byref(value))
        return value.value

    def values(self, bundle: int, kind: int) -> list[str]:
        names = []
        for index in range(self.get(bundle, kind)):
            value = _Value()
            self.call("describe", bundle, kind, index, ctypes.byref(value))
            names.append(value.name.decode())
        return names

    def set_input(self, session: int, name: str, array: np.ndarray) -> np.ndarray:
        """Set an input to an array, which the caller keeps."""
        value = self.value(array)
        value.name = name.encode()
        self.call("set_input", session, ctypes.byref(value))
        return array

    def value(self, array: np.ndarray) -> _Value:
        """Return what describes an array, which the caller keeps."""
        value = _Value(dtype=CODES[array.dtype.name], rank=array.ndim, bytes=array.nbytes)
        value.dims[: array.ndim] = array.shape
        value.data = array.ctypes.data
        return value

    def output(self, session: int, name: str = "output") -> np.ndarray:
        """Return an output of the last run, in place."""
        value = _Value()
        self.call("output", session, name.encode(), 0, ctypes.byref(value))
        dims = tuple(value.dims[: value.rank])
        data = (ctypes.c_uint8 * value.bytes).from_address(value.data)
        return np.frombuffer(data, DTYPES[value.dtype]).reshape(dims)
