"""Sweeps: many specs, dialects and runtimes on a Dask cluster, and other releases of runtimes."""

from attn_export.optional_parts import Part

PART = Part(
    commands=dict.fromkeys(("bisect", "sweep", "worker"), f"{__name__}.sweep_command"),
    runtimes={"NAME==VERSION": f"{__name__}.release"},
    installs={"NAME==VERSION": f"{__name__}.release"},
    # The last release that computes fully masked rows wrong, and the first one that does not.
    tests_need=("ort-cpu==1.27.0", "ort-cpu==1.28.0"),
)
