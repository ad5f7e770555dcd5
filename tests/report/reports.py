"""Reports of every kind: what passed, failed, was refused, crashed, or was not run."""

from __future__ import annotations

from typing import Any

from attn_export.error_maps import ErrorMap, ErrorProfile
from attn_export.results import Report, RuntimeRun, Verdict

GRAPHS = ("model.onnx", "model.ort.decode.onnx")
ENVIRONMENT = {"versions": {"numpy": "2.0"}, "python": "3.11", "system": "Linux", "cores": 2}


def run(runtime: str, outcome: Any = "ran", reason: str = "", **changes: Any) -> RuntimeRun:
    values = {"graph": GRAPHS[0], "required": True, "facts": {"version": "1.0"}} | changes
    return RuntimeRun(runtime=runtime, outcome=outcome, reason=reason, **values)


def verdict(runtime: str, status: Any, worst: float | None, **changes: Any) -> Verdict:
    values = {"graph": GRAPHS[0], "case": "B2_L3", "output": "output", "message": ""} | changes
    return Verdict(runtime=runtime, status=status, worst=worst, **values)


def error_map(**changes: Any) -> ErrorMap:
    """Return the map of an output [2, 3, 100], worst at [1, 2, 7]."""
    values = {
        "case": "B2_L3", "output": "output", "axes": ("batch", "query_len", "element"),
        "shape": (2, 3, 100), "index": (1, 2, 7), "actual": "nan", "expected": "0.25",
        "relative_to": "row", "cell": (2, 2),
        "truth": ((0.1,) * 34, (-2.0,) * 34, (4.0,) * 34),
        "runtime": ((0.1,) * 34, (2.0,) * 34, (8.0, 8.0, None, *(8.0,) * 31)),
        "difference": ((0.0,) * 34, (0.2,) * 34, (12.5,) * 34),
        "profiles": (
            ErrorProfile("batch", (None, 12.5)), ErrorProfile("query_len", (0.0, 0.2, 1.0)),
        ),
    } | changes  # fmt: skip
    return ErrorMap(**values)


def mixed() -> Report:
    """Return a report with one of each, with characters that formats must escape."""
    runs = (
        run("good"),
        run("good", "not run", "it has no TensorScatter", graph=GRAPHS[1], required=False),
        run("bad", maps=(error_map(),)),
        run("dead", "crashed", "ended with signal SIGSEGV: <core> & 100 %"),
        run("gone", "not run", "it is not installed"),
    )
    verdicts = (
        verdict("good", "passed", 0.25, max_abs=1e-7, max_rel=1e-6),
        verdict("bad", "failed", 12.5, message="relative error 1e-2 over <the> whole | output"),
        verdict("bad", "failed", 2.0, output="present_key", message="a row\x00is off"),
        verdict("bad", "error", None, case="B1", output="", message="it said: no"),
        verdict("bad", "unusable", None, case="far", message="eager has NaN"),
        verdict("dead", "passed", 0.5),
    )
    return Report("test & <more>", runs, verdicts, ENVIRONMENT, ("a note with `code`",))


def clean() -> Report:
    """Return a report in which everything passed."""
    return Report(
        "clean",
        (run("good", maps=(error_map(),)),),
        (verdict("good", "passed", 0.25),),
        ENVIRONMENT,
        (),
    )
