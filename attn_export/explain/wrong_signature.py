"""Wrong signatures: names, types or shapes of outputs that differ from the expected ones."""

from __future__ import annotations

from attn_export.explain.explanation import Cause
from attn_export.explain.graph_run import Trial

KIND = "other outputs"


def wrong_signature(trial: Trial) -> list[Cause]:
    """Return a cause for wrong names, types or shapes, in the smallest case that shows them."""
    for case in trial.failed:
        outputs = trial.ran.outputs.get(case.name)
        if outputs is None:
            continue
        wanted = case.golden.expected
        if set(outputs) != set(wanted):
            found, asked = ", ".join(outputs), ", ".join(wanted)
            return [Cause(KIND, f"the graph gives the outputs {found}; the bundle has {asked}")]
        for name, right in wanted.items():
            got = outputs[name]
            if got.dtype != right.dtype:
                return [Cause(KIND, f"{name} is {got.dtype}, and should be {right.dtype}")]
            if got.shape != right.shape:
                shapes = f"{list(got.shape)}, and should be {list(right.shape)}"
                return [Cause(KIND, f"the shape of {name} is {shapes}, in {case.name}")]
    return []
