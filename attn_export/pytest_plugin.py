"""The pytest plugin: a fixture `parity`, a marker, options. Installed with the package.

    def test_attention(parity):
        parity(module, {"query": torch.randn(2, 5, 64)}, {"query": {0: "batch", 1: "query_len"}})

    def test_a_graph_of_others(parity):
        parity(module, inputs, axes, graph="mine.onnx")

    @pytest.mark.parity("models/mqa")
    def test_bundle(parity_case):  # one test for each case of the bundle
        parity_case.check()

pytest loads it in every session: what it needs is imported where it is used.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attn_export.results import Report, Verdict

MARKER = "parity(bundle, **options): run the test once for each case of a bundle, as `parity_case`"
REPORTS = pytest.StashKey[dict[Any, Any]]()
DAMAGED = "damaged"
"""The one test of a bundle that was changed."""
WRITTEN = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("attn-export", "parity of attention in runtimes")
    group.addoption(
        "--parity-runtime", action="append", default=[], metavar="NAME",
        help="a runtime for `parity`, instead of those that a test names; may be given again",
    )  # fmt: skip
    group.addoption(
        "--parity-require", action="append", default=[], metavar="NAME",
        help="fail where this runtime cannot run; may be given again",
    )  # fmt: skip
    group.addoption(
        "--parity-report", type=Path, default=None, metavar="DIR",
        help="write the report of each test into this folder, as JSON and HTML, and a folder that "
        "reproduces what failed",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)
    config.stash[REPORTS] = {}
    config.stash[WRITTEN] = Counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one test for each case of the marker's bundle."""
    marker = metafunc.definition.get_closest_marker("parity")
    if "parity_case" not in metafunc.fixturenames:
        if marker is not None:  # it would pass, whatever the bundle is
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid} is marked with parity and does not use parity_case"
            )
        return
    if marker is None or not marker.args:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} uses parity_case and needs @pytest.mark.parity(BUNDLE)"
        )
    from attn_export.bundle import GOLDEN, read_bundle
    from attn_export.errors import AttnExportError
    from attn_export.parity.golden import case_folders

    bundle = _found(marker.args[0], metafunc.config)
    try:
        _, cases = case_folders(bundle / GOLDEN)
    except AttnExportError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from error
    names = [case.name for case in cases]
    try:
        read_bundle(bundle)
    except AttnExportError:  # one error, which the fixture raises again
        names = [DAMAGED]
    metafunc.parametrize("parity_case", names, indirect=True)


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return `assert_parity` with the runtimes of the command line."""

    def check(of: Any, *arguments: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from attn_export.jobs.assert_parity import failure

        report = _report(request, of, *arguments, **_with_runtimes(options, request.config))
        if not report.passed:
            pytest.fail(failure(report), pytrace=False)
        return report

    return check


@dataclasses.dataclass(frozen=True)
class ParityCase:
    """One case of a bundle, in all its graphs and runtimes.

    Attributes:
        name: The name of the case.
        report: The report of the whole bundle.
    """

    name: str
    report: Report

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts of the case."""
        return [verdict for verdict in self.report.verdicts if verdict.case == self.name]

    def check(self) -> None:
        """Fail the test unless every runtime that must run ran the case, and was right."""
        __tracebackhide__ = True
        wrong = [v for v in self.verdicts if v.status != "passed"]
        absent = [run for run in self.report.runs if run.required and run.outcome != "ran"]
        lines = [
            *(f"{v.runtime}, {v.graph}, {v.output}: {v.status}: {v.message}" for v in wrong),
            *(f"{run.runtime}, {run.graph}: {run.outcome}: {run.reason}" for run in absent),
        ]
        if not lines and not self.verdicts:
            lines = ["no graph of the bundle was run with it"]
        if lines:
            why = self.report.explanations if wrong else ()
            pytest.fail("\n".join([f"no parity in {self.name}", *why, *lines]), pytrace=False)


@pytest.fixture
def parity_case(request: pytest.FixtureRequest) -> ParityCase:
    """Return a case of the marker's bundle; the bundle is run once for all cases in a process."""
    __tracebackhide__ = True
    marker = request.node.get_closest_marker("parity")
    bundle = _found(marker.args[0], request.config)
    options = _with_runtimes(dict(marker.kwargs), request.config)
    reports = request.config.stash[REPORTS]
    key = (bundle, repr(sorted(options.items())))
    if key not in reports:
        reports[key] = _report(request, bundle, **options)
    return ParityCase(request.param, reports[key])


def _report(request: pytest.FixtureRequest, of: Any, *arguments: Any, **options: Any) -> Report:
    """Return `parity_report`, which is written too, or fail the test with the error's one line."""
    __tracebackhide__ = True
    from attn_export.errors import AttnExportError
    from attn_export.jobs.assert_parity import parity_report

    place = _place(request)
    if place is not None:
        options["reproduction"] = place.with_name(f"{place.name}.explained")
    try:
        report = parity_report(of, *arguments, **options)
    except AttnExportError as error:
        said = str(error)
    else:
        _keep(report, place)
        return report
    # Outside of `except`: pytest would show the error once more, as the failure's context.
    pytest.fail(said, pytrace=False)


def _found(bundle: Any, config: pytest.Config) -> Path:
    """Return a bundle's path; a relative one is below pytest's root folder."""
    return Path(config.rootpath, bundle)


def _with_runtimes(options: dict[str, Any], config: pytest.Config) -> dict[str, Any]:
    named = config.getoption("--parity-runtime")
    required = config.getoption("--parity-require")
    return {
        **options,
        **({"runtimes": named} if named else {}),
        "require": [*options.get("require", ()), *required],
    }


def _place(request: pytest.FixtureRequest) -> Path | None:
    """Return the path of the test's next report, without the ending; None without a folder."""
    folder = request.config.getoption("--parity-report")
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", request.node.nodeid)
    written = request.config.stash[WRITTEN]
    written[stem] += 1  # a test may ask for parity several times
    number = f".{written[stem]}" if written[stem] > 1 else ""
    return Path(folder, f"{stem}{number}")


def _keep(report: Report, place: Path | None) -> None:
    if place is None:
        return
    from attn_export.output_folder import write_whole
    from attn_export.report.data import to_json
    from attn_export.report.html import to_html

    write_whole(place.with_name(f"{place.name}.json"), to_json(report))
    write_whole(place.with_name(f"{place.name}.html"), to_html(report, None))
