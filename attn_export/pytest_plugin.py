"""The pytest plugin: the fixtures `parity` and `parity_case`, a marker, and options.

    def test_attention(parity):
        parity(module, {"query": torch.randn(2, 5, 64)}, {"query": {0: "batch", 1: "query_len"}})

    def test_a_graph_of_others(parity):
        parity(module, inputs, axes, graph="mine.onnx")

    @pytest.mark.parity("models/mqa")
    def test_bundle(parity_case):  # one test for each case of the bundle
        parity_case.check()

pytest loads the plugin in every session, so the rest of the package is imported inside functions.
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

_MARKER = "parity(bundle, **options): run the test once for each case of a bundle, as `parity_case`"
REPORTS = pytest.StashKey[dict[Any, Any]]()
"""The reports of bundles, by bundle and options."""

DAMAGED = "damaged"
"""The name of the only test of a damaged bundle."""

WRITTEN = pytest.StashKey[Counter[str]]()
"""The number of reports that were written, by test."""


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
    config.addinivalue_line("markers", _MARKER)
    config.stash[REPORTS] = {}
    config.stash[WRITTEN] = Counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one test for each case of the marker's bundle."""
    marker = metafunc.definition.get_closest_marker("parity")
    if "parity_case" not in metafunc.fixturenames:
        if marker is not None:  # the test would always pass
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid} is marked with parity and does not use parity_case"
            )
        return
    if marker is None or not marker.args:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} uses parity_case and needs @pytest.mark.parity(BUNDLE)"
        )
    from attn_export.bundle.golden import stored_cases
    from attn_export.bundle.manifest import GOLDEN, read_bundle
    from attn_export.errors import AttnExportError

    bundle = _bundle_path(marker.args[0], metafunc.config)
    try:
        _, cases = stored_cases(bundle / GOLDEN)
    except AttnExportError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from error
    names = [case.name for case in cases]
    try:
        read_bundle(bundle)
    except AttnExportError:  # reported by one test: the fixture raises the error again
        names = [DAMAGED]
    metafunc.parametrize("parity_case", names, indirect=True)


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """Return `assert_parity` with the options of the command line."""

    def check(of: Any, *arguments: Any, **options: Any) -> Report:
        __tracebackhide__ = True
        from attn_export.commands.assert_parity import failure

        options = _with_runtimes(options, request.config)
        report = _report(request, of, *arguments, title=request.node.name, **options)
        if not report.passed:
            pytest.fail(failure(report), pytrace=False)
        return report

    return check


@dataclasses.dataclass(frozen=True)
class _ParityCase:
    """One case of a bundle, in all graphs and runtimes."""

    name: str
    report: Report

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts of the case."""
        return [verdict for verdict in self.report.verdicts if verdict.case == self.name]

    def check(self) -> None:
        """Fail the test unless all verdicts of the case passed and all required runtimes ran."""
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
            from attn_export.report.tables import reproduce_command

            causes = [*self.report.explanations] if wrong else []
            if wrong and (command := reproduce_command(self.report.reproduction)):
                causes.append(f"reproduce: {command}")
            pytest.fail("\n".join([f"no parity in {self.name}", *causes, *lines]), pytrace=False)


@pytest.fixture
def parity_case(request: pytest.FixtureRequest) -> _ParityCase:
    """Return a case of the marker's bundle. A process runs the bundle once for all cases."""
    __tracebackhide__ = True
    marker = request.node.get_closest_marker("parity")
    bundle = _bundle_path(marker.args[0], request.config)
    options = _with_runtimes(dict(marker.kwargs), request.config)
    reports = request.config.stash[REPORTS]
    key = (bundle, repr(sorted(options.items())))
    if key not in reports:
        reports[key] = _report(request, bundle, **options)
    return _ParityCase(request.param, reports[key])


def _report(
    request: pytest.FixtureRequest, of: Any, *arguments: Any, title: str = "", **options: Any
) -> Report:
    """Return the report and write it if required; fail the test with the message of an error.

    The name of the report is `title`, or by default that of the bundle.
    """
    __tracebackhide__ = True
    from attn_export.commands.assert_parity import parity_report
    from attn_export.errors import AttnExportError, printable

    stem = _report_stem(request)
    if stem is not None:
        options["reproduction"] = stem.with_name(f"{stem.name}.explained")
    if "graphs" in options:  # of a whole model
        options["graph"] = options.pop("graphs")
    try:
        report = parity_report(of, *arguments, **options)
    except AttnExportError as error:
        message = str(error)
    else:
        report = dataclasses.replace(report, name=printable(title) or report.name)
        _write(report, stem)
        return report
    # Not within `except`, where pytest would also show the error as the context of the failure.
    pytest.fail(message, pytrace=False)


def _bundle_path(bundle: Any, config: pytest.Config) -> Path:
    """Return the path of a bundle. A relative path starts at pytest's root folder."""
    return Path(config.rootpath, bundle)


def _with_runtimes(options: dict[str, Any], config: pytest.Config) -> dict[str, Any]:
    from attn_export.configuration import read_configuration
    from attn_export.errors import UsageError

    try:
        table = read_configuration(config.rootpath)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
    named = config.getoption("--parity-runtime")
    required = config.getoption("--parity-require") or table.require
    return {
        "runtimes": table.runtimes,
        **options,
        **({"runtimes": named} if named else {}),
        "require": [*options.get("require", ()), *required],
    }


def _report_stem(request: pytest.FixtureRequest) -> Path | None:
    """Return the path of the test's next report without suffix; None if none is to be written."""
    folder = request.config.getoption("--parity-report")
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "_", request.node.nodeid)
    written = request.config.stash[WRITTEN]
    written[stem] += 1  # a test may use the fixture several times
    number = f".{written[stem]}" if written[stem] > 1 else ""
    return Path(folder, f"{stem}{number}")


def _write(report: Report, stem: Path | None) -> None:
    if stem is None:
        return
    from attn_export.output_folder import write_whole
    from attn_export.report.data import to_json
    from attn_export.report.html import to_html

    write_whole(stem.with_name(f"{stem.name}.json"), to_json(report))
    write_whole(stem.with_name(f"{stem.name}.html"), to_html(report))
