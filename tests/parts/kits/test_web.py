"""The kit for the browser, as a user has it: served, opened, looked at, driven by keys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chromium_page import Page
from conftest import ROOT
from evidence import UNCOMPARED, without_evidence
from javascript_kits import kit_of, plant_fault, run, served, several_queries
from readmes import blocks
from shared import bundle_of, extended, spec_of

from attn_export.parts.kits.kit import write_kit

pytestmark = pytest.mark.xdist_group("test_web")  # a browser, and pages that are shown once

Need = Callable[[str], None]
STATE = "document.body.dataset.state"
DONE = f"{STATE} !== 'running'"
TEXT = "document.getElementById('verdict').textContent"
ROWS_SHOWN = "[...document.getElementById('cases').tBodies].map((group) => group.innerText)"
CONTRAST = (ROOT / "tests" / "contrast.js").read_text()
NAMES = ("append", "in-place", "float16")


@pytest.fixture(autouse=True)
def _wasm(need: Need) -> None:
    need("wasm")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with Page() as opened:
        opened.look(800)
        yield opened


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a kit of a right bundle."""
    with served(kit_of("web", bundle_of("append"), tmp_path_factory.mktemp("web"), "web")) as found:
        yield found


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a kit of a bundle with a wrong scale."""
    kit = kit_of("web", bundle_of("append"), tmp_path_factory.mktemp("failing"), "web")
    plant_fault(kit / "bundle", spec_of("append"))
    with served(kit) as found:
        yield found


def show(page: Page, address: str) -> None:
    """Open a page and wait until it has run; one that is shown already stays as it is."""
    if page.evaluate("location.href").rstrip("/") != address.rstrip("/"):
        page.open(address)
    page.wait(DONE)


@pytest.fixture
def shown(address: str, page: Page) -> str:
    """Return the address of a page that shows success; tests must only read it."""
    show(page, address)
    return address


@pytest.fixture
def passing(shown: str, page: Page) -> Iterator[str]:
    """Yield the address of a page that shows success, which the test may change."""
    yield shown
    page.open("about:blank")


@pytest.mark.extended
def test_it_is_set_up_as_its_readme_says(tmp_path: Path, page: Page):
    kit = write_kit("web", bundle_of("append"), tmp_path / "kit")
    installed = run(kit, "npm", "ci", "--ignore-scripts")
    assert installed.returncode == 0, installed.stderr
    command = ["npm", "start", "--silent", "--", "0"]
    with subprocess.Popen(
        command, cwd=kit, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("open ").strip()
        try:
            page.open(address)
            page.wait(DONE)
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # npm and what it started
    assert page.evaluate(STATE) == "passed", page.evaluate(TEXT)


@pytest.mark.parametrize("name", extended(NAMES, lambda name: name == "in-place"))
def test_it_shows_that_every_case_passes_and_runs_the_programs_in_its_readme(
    name: str, tmp_path: Path, page: Page
):
    page.errors.clear()
    page.requests.clear()
    kit = kit_of("web", bundle_of(name), tmp_path, "web")
    show = "document.body.dataset.mine = [outputs, step].map((of) => Object.keys(of)[0]).join();"
    (kit / "mine.mjs").write_text("\n".join([*blocks(kit, "js"), show]))
    with served(kit) as address:
        page.open(address)
        page.wait(DONE)
        rows = page.evaluate(ROWS_SHOWN)
        assert page.evaluate(STATE) == "passed", [row for row in rows if "passed" not in row]
        assert page.evaluate(TEXT) == f"✓ Passed: all {len(rows)} cases."
        assert len(rows) > 20
        assert all(re.search(r"✓ passed\s+\d\.\d{3}\s+\d+\.\d", row) for row in rows), rows
        assert any("replay of" in row for row in rows)
        page.wait("document.getElementById('facts').innerText.includes('ms per token')")
        facts = page.evaluate("document.getElementById('facts').innerText")
        page.evaluate("import('/mine.mjs').catch((e) => { document.body.dataset.mine = e; }), 0")
        page.wait("document.body.dataset.mine")
        assert page.evaluate("document.body.dataset.mine") == "output,output"
    page.open("about:blank")
    assert re.search(r"onnxruntime-web 1\.\d+\.\d+.*, WebAssembly", facts)
    assert re.search(r"CPU, [2-9] threads", facts)  # the page is isolated
    assert page.errors == []
    assert [u for u in page.requests if not u.startswith((address, "data:", "blob:"))] == []


def test_what_is_not_compared_does_not_pass_and_has_a_reason(tmp_path: Path, page: Page):
    bundle = without_evidence(bundle_of("append"), tmp_path / "bundle")
    with served(kit_of("web", bundle, tmp_path, "web")) as address:
        page.open(address)
        page.wait(DONE)
        shown = {found.split()[0]: found for found in page.evaluate(ROWS_SHOWN)}
        assert page.evaluate(STATE) == "failed"
        assert page.evaluate(TEXT).startswith(f"✗ Failed: {len(UNCOMPARED)} of {len(shown)} cases")
    for name, (_, status, says) in UNCOMPARED.items():
        assert f"✗ {status}" in shown[name]
        assert says.replace("1e+09", "1000000000").replace("inf", "Infinity") in shown[name]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model.portable.onnx", "model.portable.onnx"),
        ("golden/test_data_set_3/output_0.pb", "test_data_set_3/output_0.pb cannot be read: 404"),
    ],
)
def test_missing_files_are_named(file: str, says: str, tmp_path: Path, page: Page):
    kit = kit_of("web", bundle_of("append"), tmp_path, "web")
    (kit / "bundle" / file).unlink()
    with served(kit) as address:
        page.open(address)
        page.wait(DONE)
        assert page.evaluate(STATE) == "error"
        assert page.evaluate(TEXT).startswith("Cannot be run: ")
        assert says in page.evaluate(TEXT)


@pytest.mark.extended
def test_webgpu_runs_it_and_names_what_computes(address: str, page: Page, need: Need):
    need("webgpu")
    page.open(f"{address}?engine=webgpu")
    page.wait(DONE, 120)
    assert page.evaluate(STATE) == "passed", page.evaluate(ROWS_SHOWN)
    facts = page.evaluate("document.getElementById('facts').innerText")
    assert "WebGPU" in facts
    assert "swiftshader, in software" in facts


# -- for everybody ------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.every(3)
def test_it_fits_and_can_be_read(width: int, dark: bool, shown: str, page: Page, tmp_path: Path):
    page.look(width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    assert len(page.screenshot(tmp_path / "page.png")) > 20_000
    page.look(800)


def test_a_page_has_the_texts_for_screen_readers(shown: str, page: Page):
    found = page.accessible()
    assert ("heading", "Attention check") in found
    assert ("radio", "WebAssembly") in found, [pair for pair in found if "Web" in pair[1]]
    assert ("button", "Run again") in found
    assert ("columnheader", "Result") in found
    assert any(role == "rowheader" and "shape_B1_P0_L1" in name for role, name in found)
    assert any(role == "image" and name.startswith("Head 0: ") for role, name in found)
    assert any(role == "status" for role, _ in found)
    unnamed = {
        role for role, name in found
        if not name and role in {"button", "radio", "combobox", "spinbutton", "image", "img"}
    }  # fmt: skip
    assert unnamed == set()
    assert page.evaluate("document.getElementById('verdict').getAttribute('role')") == "status"


def test_keys_reach_every_control_and_the_focus_is_seen(shown: str, page: Page):
    reached = []
    for _ in range(12):
        page.press("Tab")
        name, outline = page.evaluate(
            "(({ id, name, type, tagName }) => [id || name || type || tagName, "
            "getComputedStyle(document.activeElement).outlineStyle])(document.activeElement)"
        )
        reached.append(name)
        assert outline != "none" or name == "BODY", name
    wanted = ["engine", "submit", "folder", "weights-case", "weights-batch", "weights-head"]
    assert [name for name in reached if name in wanted][:6] == wanted
    assert {"weights-query", "weights-key"} <= set(reached)


# -- the picture of the weights -----------------------------------------------------------------

CHOOSE = (
    "(id, value) => { const at = document.getElementById(id); at.value = value;"
    " at.dispatchEvent(new Event('change')); return at.value; }"
)
VALUE = "document.getElementById('weights-value').textContent"


def test_the_weights_are_drawn_and_another_head_looks_otherwise(passing: str, page: Page):
    cases = page.evaluate("[...document.querySelectorAll('#weights-case option')].length")
    assert cases > 20
    name, queries, keys, visible = several_queries(bundle_of("append"))
    assert page.evaluate(f"({CHOOSE})('weights-case', '{name}')") == name
    picture = "document.getElementById('heat-map').toDataURL()"
    first = page.evaluate(picture)
    assert page.evaluate("document.getElementById('heat-map-says').textContent").startswith(
        f"Head 0: {queries} queries (down) by {keys} keys (across); the largest weight, 0."
    )
    assert page.evaluate(f"({CHOOSE})('weights-head', '1')") == "1"
    assert page.evaluate(picture) != first
    # Weights that a causal mask hides are 0: the first query does not see the last key.
    page.evaluate(f"({CHOOSE})('weights-key', '{keys - 1}')")
    assert float(page.evaluate(VALUE)) == 0
    page.evaluate(f"({CHOOSE})('weights-key', '{visible}')")
    assert 0 < float(page.evaluate(VALUE)) < 1
    page.evaluate(f"({CHOOSE})('weights-key', '9999')")  # there is none
    assert page.evaluate("document.getElementById('weights-key').value") == f"{keys - 1}"


def test_files_that_are_no_bundle_are_said(passing: str, page: Page):
    page.drop(bundle_of("append") / "model.onnx")
    page.wait(f"{STATE} === 'error'")
    assert "manifest.json cannot be read" in page.evaluate(TEXT)
    assert "give the whole folder of a bundle" in page.evaluate(TEXT)
