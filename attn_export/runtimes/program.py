"""An engine in another language: a program that holds a graph and is fed over its pipes.

The runtime's own process starts the program and stays between it and the job: it reads and writes
tensor files, lays caches out and takes decodes step by step, so that a program has three things to
do: load, run, answer. Its input and output (lines end with a newline; numbers are decimal; bytes
are the elements in C order, little-endian; DTYPE is ONNX's `TensorProto.DataType`):

    program:  loaded {"version": …, …}         once, a JSON object of facts; or `error TEXT`
    us:       run INPUTS BOUND                 then so many tensors, then so many bound outputs
              DTYPE RANK DIM … NAME            a tensor, its bytes follow
              OUTPUT<tab>INPUT                 an output to put into an input's buffer, if it can
    program:  outputs COUNT                    then so many tensors; or `error TEXT`

At the end of its input the program ends. Its stderr is kept for the error message if it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attn_export.runtimes.protocol import Engine, EngineDiedError, Facts

# numpy comes in with the methods: `verify` starts its runtimes' processes first.
if TYPE_CHECKING:
    import numpy as np

LONGEST_LINE = 1 << 16
PATIENCE = 0.5
"""Seconds that a program has to end by itself."""


class ProgramEngine(Engine):
    """A program that holds a graph.

    Args:
        command: The command line; the graph and the threads follow.
        graph: The file.
        threads: For computing.
        environment: Additions to this process's environment.

    Raises:
        EngineDiedError: If it ends before the graph is loaded, or sends an unexpected line.
        RuntimeError: If it refuses the graph.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        graph: Path,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = Path(command[0]).name
        self._process = subprocess.Popen(
            [*map(str, command), str(graph), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout
        found = self._answer("loaded")
        try:
            self._facts: dict[str, Any] = json.loads(found)
        except ValueError as error:
            raise self._died(f"said {found[:80]!r} of itself") from error

    def run(
        self, inputs: Mapping[str, np.ndarray], bound: Mapping[str, str]
    ) -> dict[str, np.ndarray]:
        """Run once.

        Args:
            inputs: The inputs, by name.
            bound: Names of outputs that share the buffer of an input, with that input.
        """
        try:
            self._in.write(f"run {len(inputs)} {len(bound)}\n".encode())
            for name, array in inputs.items():
                self._send(name, array)
            for pair in bound.items():
                self._in.write(("\t".join(pair) + "\n").encode())
            self._in.flush()
        except BrokenPipeError as error:
            raise self._died("closed its input") from error
        count = self._number(self._answer("outputs"))
        return dict(self._received() for _ in range(count))

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
        # Its memory as bytes: `tobytes` would copy a cache of hundreds of MiB.
        self._in.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _received(self) -> tuple[str, np.ndarray]:
        import numpy as np

        from attn_export.tensorfile import numpy_dtype
        from attn_export.tensorproto import DTYPES

        line = self._line()
        try:
            dtype, rank, rest = line.split(" ", 2)
            *dims, name = rest.split(" ", int(rank))
            shape = tuple(map(int, dims))
            kind = numpy_dtype(DTYPES[int(dtype)])
        except (ValueError, KeyError) as error:
            raise self._died(f"said {line[:80]!r} where a tensor was due") from error
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        data = self._out.read(size)
        if len(data) < size:
            raise self._died(f"stopped within {name}")
        return name, np.frombuffer(data, kind).reshape(shape)

    def _answer(self, wanted: str) -> str:
        """Return the rest of a line that starts with the expected word."""
        line = self._line()
        word, _, rest = line.partition(" ")
        if word == "error":
            raise RuntimeError(rest)
        if word != wanted:
            raise self._died(f"said {line[:80]!r} where {wanted!r} was due")
        return rest

    def _number(self, text: str) -> int:
        if not text.isdecimal():
            raise self._died(f"said {text[:80]!r} where a number was due")
        return int(text)

    def _line(self) -> str:
        line = self._out.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise self._died("ended" if not line else f"said {line[:80]!r} without an end")
        return line[:-1].decode(errors="replace")

    def _died(self, what: str) -> EngineDiedError:
        """End the program, and return the error to raise; its reason includes the exit."""
        code = self._end()
        if code is None:
            return EngineDiedError(f"{self._name} {what}")
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineDiedError(f"{self._name} {what}: {how}")


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a program; its exit code, or None if it had to be killed."""
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
