"""Sweeps: many specs, dialects and runtimes on a Dask cluster, with one store of results."""

from attn_export.parts import Part

PART = Part(
    commands=dict.fromkeys(("bisect", "site", "sweep", "worker"), f"{__name__}.sweep_command")
)
