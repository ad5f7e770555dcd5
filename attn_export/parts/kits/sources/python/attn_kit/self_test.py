"""Self-test: run the golden vectors.

Exit code 0: all cases passed; 1: a case failed or is not compared; 2: the model cannot be loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import numpy as np

from attn_kit.cache_layout import from_graph, to_graph
from attn_kit.files import one_line, printable
from attn_kit.golden import Case, cases
from attn_kit.model import Model, bundle_folder
from attn_kit.replay import replay
from attn_kit.rule import judge_array
from attn_kit.settings import CACHE, NAME, REPLAY, ROUNDS_INPUTS

LABELS = {"failed": "FAIL", "unusable": "not-compared", "passed": "ok  "}
"""The printed form of each status, the worst first."""


def main() -> int:
    """Run every case in one loaded model."""
    try:
        model = Model()
        all_cases = list(cases(bundle_folder()))
    except Exception as error:  # whatever the engine raises
        print(f"{printable(NAME)}: {one_line(error)}", file=sys.stderr)
        return 2
    results = [check(case.name, case, lambda case: _run_case(model, case)) for case in all_cases]
    replayed = next((case for case in all_cases if case.name == REPLAY), None)
    if replayed is not None:
        name = f"{replayed.name}, token by token"
        results.append(check(name, replayed, lambda case: replay(model, case.inputs), whole=False))
    print(f"{printable(NAME)}: {sum(results)}/{len(results)} passed")
    return 0 if all(results) else 1


def _run_case(model: Model, case: Case) -> dict[str, np.ndarray]:
    """Return the outputs of a whole case."""
    inputs = {name: array.copy() for name, array in case.inputs.items()}
    return from_graph(model.run(to_graph(inputs), in_place=CACHE == "in-place"))


def check(
    name: str, case: Case, run: Callable[[Case], Mapping[str, np.ndarray]], *, whole: bool = True
) -> bool:
    """Run a case, print the result, and return whether it passed."""
    try:
        outputs = run(case)
    except Exception as error:  # whatever the engine raises
        print(f"{LABELS['failed']} {printable(name)}  {one_line(error)}")
        return False
    return passes(name, case, outputs, whole=whole)


def passes(name: str, case: Case, outputs: Mapping[str, np.ndarray], *, whole: bool = True) -> bool:
    """Judge the outputs of a case, print the result, and return whether it passed.

    Args:
        name: The name of the case, for the output.
        case: The case.
        outputs: The outputs of a run.
        whole: Whether every output must be there.
    """
    messages: dict[str, list[str]] = {status: [] for status in LABELS}
    worst = 0.0
    for output in set(outputs) - set(case.expected):
        messages["failed"].append(f"unexpected output {output}")
    for output, reference in case.expected.items():
        if output in outputs:
            found = judge_array(
                outputs[output],
                reference,
                case.tolerance[output],
                case.uncompared.get(output),
                case.ignored_rows,
                has_limit=not ROUNDS_INPUTS,
            )
            worst = max(worst, found.worst or 0.0)
            messages[found.status].append(f"{output}: {found.message}")
        elif whole:
            messages["failed"].append(f"{output}: missing")
    status = next((status for status, texts in messages.items() if texts), "passed")
    passed = status == "passed"
    details = f"{worst:.3f} of tolerance" if passed else "; ".join(messages[status])
    print(f"{LABELS[status]} {printable(name)}  {printable(details)}")
    return passed


if __name__ == "__main__":
    sys.exit(main())
