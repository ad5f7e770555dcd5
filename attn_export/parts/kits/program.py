"""Engines in other languages: programs that load a graph and run it on inputs from a pipe.

The runtime's worker process starts the program. The worker reads and writes tensor files, converts
layouts and decodes step by step, so that the program only loads the graph, runs it and sends the
outputs. The protocol (lines end with a newline; numbers are decimal; bytes are the elements in C
order, little-endian; DTYPE is ONNX's `TensorProto.DataType`):

    program:  loaded {"version": …, …}         once, a JSON object of facts; or `error TEXT`
    worker:   run INPUTS BOUND                 followed by INPUTS tensors, and BOUND bound outputs
              DTYPE RANK DIM … NAME            a tensor, followed by its bytes
              OUTPUT<tab>INPUT                 an output to write to an input's buffer, if possible
    program:  outputs COUNT                    followed by COUNT tensors; or `error TEXT`

The program ends when its input ends. Its stderr is that of the worker process, whose last line
becomes part of the error message if the worker ends too.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from attn_export.dialect_names import CUDA, DIALECTS
from attn_export.runtimes.protocol import Engine, EngineDiedError, Facts, Options, Runtime

# Methods import numpy, so that importing this module is fast.
if TYPE_CHECKING:
    import numpy as np

_LONGEST_LINE = 1 << 16
"""The largest number of bytes of a line of the protocol."""

PATIENCE = 0.5
"""The number of seconds after which a program that does not end by itself is killed."""


class ProgramEngine(Engine):
    """A program that has loaded a graph.

    The graph and the number of threads are appended to the command line.
    """

    def __init__(self, command: Sequence[str | Path], graph: Path, threads: int) -> None:
        self._name = Path(command[0]).name
        self._process = subprocess.Popen(
            [*map(str, command), str(graph), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout
        facts = self._expect("loaded")
        try:
            self._facts: dict[str, Any] = json.loads(facts)
        except ValueError as error:
            raise self._died(f"said {facts[:80]!r} of itself") from error

    def run(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Run the graph once; return the outputs, by name."""
        try:
            self._in.write(f"run {len(inputs)} {len(bound)}\n".encode())
            for name, array in inputs.items():
                self._send(name, array)
            for pair in bound.items():
                self._in.write(("\t".join(pair) + "\n").encode())
            self._in.flush()
        except BrokenPipeError as error:
            raise self._died("closed its input") from error
        count = self._number(self._expect("outputs"))
        return dict(self._receive() for _ in range(count))

    def facts(self) -> Facts:
        """Return the facts that the program sent when it loaded the graph."""
        return self._facts

    def _send(self, name: str, array: np.ndarray) -> None:
        import numpy as np

        from attn_export.tensorproto import CODES

        if "\n" in name or "\t" in name:
            raise ValueError(f"the name {name!r} holds a newline or a tab; rename it")
        dims = "".join(f" {size}" for size in array.shape)
        self._in.write(f"{CODES[array.dtype.name]} {array.ndim}{dims} {name}\n".encode())
        # The memory of the array itself: `tobytes` would copy a cache of hundreds of MiB.
        self._in.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _receive(self) -> tuple[str, np.ndarray]:
        import numpy as np

        from attn_export.tensorfile import numpy_dtype
        from attn_export.tensorproto import DTYPES

        line = self._line()
        try:
            code, rank, dims_and_name = line.split(" ", 2)
            *dims, name = dims_and_name.split(" ", int(rank))
            shape = tuple(map(int, dims))
            dtype = numpy_dtype(DTYPES[int(code)])
        except (ValueError, KeyError) as error:
            raise self._died(f"said {line[:80]!r} where a tensor was due") from error
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        data = self._out.read(size)
        if len(data) < size:
            raise self._died(f"stopped within {name}")
        return name, np.frombuffer(data, dtype).reshape(shape)

    def _expect(self, expected: str) -> str:
        """Read a line that must start with the expected word, and return the text after it."""
        line = self._line()
        word, _, text = line.partition(" ")
        if word == "error":
            raise RuntimeError(text)
        if word != expected:
            raise self._died(f"said {line[:80]!r} where {expected!r} was due")
        return text

    def _number(self, text: str) -> int:
        if not text.isdecimal():
            raise self._died(f"said {text[:80]!r} where a number was due")
        return int(text)

    def _line(self) -> str:
        line = self._out.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise self._died("ended" if not line else f"said {line[:80]!r} without an end")
        return line[:-1].decode(errors="replace")

    def _died(self, problem: str) -> EngineDiedError:
        """End the program, and return an error with the problem and the exit status."""
        code = self._end()
        if code is None:
            return EngineDiedError(f"{self._name} {problem}")
        status = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineDiedError(f"{self._name} {problem}: {status}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a program; return its exit code, or None if it was killed."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


class ProgramRuntime(Runtime, Protocol):
    """A runtime whose engines are programs."""

    dialects: frozenset[str] = frozenset(DIALECTS) - {CUDA}

    def command(self) -> Sequence[str | Path]:
        """Return the command line of the program, without the graph and the number of threads."""
        ...

    def prepare(self) -> None:
        """Do nothing: loading a graph starts the program."""
        return  # without it, this would be abstract

    def _load(self, graph: Path, threads: int, options: Options) -> Engine:  # noqa: ARG002
        return ProgramEngine(self.command(), graph, threads)
