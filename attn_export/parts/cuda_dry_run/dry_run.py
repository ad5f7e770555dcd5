"""The job behind `dry-run`: run graphs in the CUDA provider without a GPU or numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attn_export.bundle.manifest import MANIFEST, read_bundle, read_manifest
from attn_export.dialect_names import check_dialects
from attn_export.errors import RuntimeFailure, UsageError
from attn_export.parts.cuda_dry_run.dry_run_results import (
    Architecture,
    Observation,
    architectures_named,
)
from attn_export.parts.cuda_dry_run.install_cuda_stand_in import CUDA_STAND_IN, not_ready
from attn_export.parts.installing import home
from attn_export.runtimes.child import limited
from attn_export.runtimes.protocol import Limits
from attn_export.runtimes.run_options import Progress
from attn_export.schema import GraphFile

LIBRARY_PATH = "LD_LIBRARY_PATH"
"""The variable with the folders in which Linux looks for libraries first."""

_MOST_SIZE = 2**24
"""The largest size of an axis."""

_DryRunSizes = tuple[int, int | None, int | None]
"""B, L and P of a dry run; None for the defaults of `dry_run`."""


def dry_run(
    path: Path | str,
    *,
    architectures: Sequence[str] = (),
    dialects: Sequence[str] = (),
    batch: int = 1,
    query_len: int | None = None,
    past_len: int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> list[Observation]:
    """Load and run graphs in the CUDA provider over stand-in libraries, which compute nothing.

    Each combination of graph and architecture has a process of its own.

    Returns:
        The observations of each graph on each architecture.
    """
    cards, names = architectures_named(architectures), check_dialects(dialects)
    folder, files, roles = _graphs(Path(path), names)
    check_ready()
    sizes, progress = (batch, query_len, past_len), progress or Progress()
    progress.expect(len(files) * len(cards))
    observations = []
    for file in files:
        for card in cards:
            observations.append(observe(folder, file, card, sizes, limits, roles))
            progress.advance(f"{file.name} on {card.name}")
    return observations


def check_ready() -> None:
    """Raise RuntimeFailure if the stand-in libraries are not built here."""
    reason = not_ready()
    if reason:
        raise RuntimeFailure(f"no dry run of CUDA: {reason}")


def _graphs(
    path: Path, dialects: Sequence[str]
) -> tuple[Path, Sequence[GraphFile], Mapping[str, str]]:
    """Return the folder of the graphs, their descriptions, and roles of axes."""
    if path.is_dir():
        manifest = read_bundle(path)
        files = [*manifest.graphs.values()]
        chosen = [file for file in files if not dialects or file.dialect in dialects]
        if not chosen:
            has = ", ".join(sorted({file.dialect for file in files}))
            raise UsageError(f"{path} has no graph of {', '.join(dialects)}; it has {has}")
        return path, chosen, manifest.roles
    if dialects:
        raise UsageError("--dialect is for bundles; an ONNX file is run as it is")
    if not path.is_file():
        raise UsageError(f"cannot read {path}: no such file")
    if (path.parent / MANIFEST).is_file():
        manifest = read_manifest(path.parent)
        if entry := manifest.graphs.get(path.name):
            return path.parent, [entry], manifest.roles
    return path.parent, [GraphFile(path.name)], {}


def observe(
    folder: Path, file: GraphFile, card: Architecture, sizes: _DryRunSizes,
    limits: Limits | None = None, roles: Mapping[str, str] = {},
) -> Observation:  # fmt: skip
    """Return the observations of a dry run of one graph in a child process."""
    import msgspec

    batch, query_len, past_len = sizes
    for name, size, least in (
        ("batch", batch, 1),
        ("query_len", query_len, 1),
        ("past_len", past_len, 0),
    ):
        if size is not None and (type(size) is not int or not least <= size <= _MOST_SIZE):
            raise UsageError(
                f"{name} of a dry run is {size!r}; give a whole number from {least} to {_MOST_SIZE}"
            )
    fixed = {roles.get(axis, axis): size for axis, size in file.fixed.items()}
    batch = fixed.get("batch", batch)
    if query_len is not None:  # 1 in a graph for one query
        query_len = fixed.get("query_len", query_len)
    values = limited(
        "attn_export.parts.cuda_dry_run.dry_run_session:observe", str(folder / file.name), limits,
        # The provider opens some libraries by name later: they must not be those of this machine.
        {LIBRARY_PATH: str(home() / CUDA_STAND_IN)},
        graph=str(folder / file.name), architecture=card.name, bound=dict(file.bound),
        roles=dict(roles), batch=batch, query_len=query_len, past_len=past_len,
    )  # fmt: skip
    return msgspec.convert(values, Observation)
