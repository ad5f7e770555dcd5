"""report.html as people read it: in Chromium, narrow and wide, light and dark, and printed."""

from __future__ import annotations

import base64
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium_page import Page, chromium
from conftest import ROOT
from reports import ENVIRONMENT, run, verdict

from attn_export import Report, verify
from attn_export.graph.load import load_graph
from attn_export.graph.save import save_graphs
from attn_export.report.html import to_html

pytestmark = pytest.mark.xdist_group("test_page_in_chromium")  # one browser

CONTRAST = (ROOT / "tests" / "contrast.js").read_text()
CHECKS = Path(__file__).with_name("page_checks.js").read_text()
WIDTHS = (360, 768, 1280)
PAPER = 718
"""A4 within margins of 1 cm, in CSS pixels."""

looks = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
widths = pytest.mark.parametrize("width", WIDTHS)
pages = pytest.mark.parametrize("name", ["passed", "failed"])


def wrong_scale(bundle: Path, folder: Path) -> Report:
    """Return verdicts on the bundle's graph with another softmax scale."""
    import onnx_ir as ir

    model = load_graph(bundle / "model.onnx")
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    node.attributes.add(ir.AttrFloat32("scale", 0.3))
    folder.mkdir()
    save_graphs({"model.onnx": model}, folder)
    return verify(bundle, graph=folder / "model.onnx", runtimes=["ort-cpu"])


@pytest.fixture(scope="module")
def files(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a page of a bundle that passed, and of one that failed."""
    folder = tmp_path_factory.mktemp("pages")
    failed = wrong_scale(bundle, folder / "wrong")
    assert not failed.passed
    shutil.copyfile(bundle / "report.html", folder / "passed.html")
    (folder / "failed.html").write_text(to_html(failed))
    return {name: folder / f"{name}.html" for name in ("passed", "failed")}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with Page() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _chromium(need) -> None:
    if chromium() is None:
        need("wasm")  # says what to install


def shown(page: Page, file: Path, width: int, *, dark: bool = False, unfolded: bool = True) -> None:
    page.errors.clear()
    page.requests.clear()
    page.look(width, dark=dark)
    page.open(file.as_uri())
    if unfolded:
        page.evaluate("document.querySelectorAll('details').forEach((at) => { at.open = true })")


@pages
@looks
@widths
@pytest.mark.every(3)
def test_it_fits_is_readable_and_asks_for_nothing(
    name: str, width: int, dark: bool, files: dict[str, Path], page: Page, tmp_path: Path
):
    shown(page, files[name], width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(CHECKS) == []
    assert page.errors == []
    assert page.requests == [files[name].as_uri()]
    assert len(page.screenshot(tmp_path / "page.png")) > 10_000


@pages
@looks
def test_colours_that_mean_something_are_distinguishable(name, dark, files, page: Page):
    """Check that the scale is monotonic in lightness, and that the worst mark shows on its halo."""
    shown(page, files[name], 768, dark=dark)
    luminances = page.evaluate(f"({LUMINANCES})(['e0', 'e1', 'e2', 'e3', 'e4'])")
    assert luminances in (sorted(luminances), sorted(luminances, reverse=True))
    ratios = [(max(a, b) + 0.05) / (min(a, b) + 0.05) for a, b in itertools.pairwise(luminances)]
    assert min(ratios) > 1.2, ratios
    mark, halo = (STROKE.format(which=which) for which in (":not(.halo)", ".halo"))
    assert page.evaluate(mark) != page.evaluate(halo) == page.evaluate(BACK)


STROKE = "getComputedStyle(document.querySelector('.mark{which}')).stroke"
BACK = "getComputedStyle(document.body).backgroundColor"
LUMINANCES = """(names) => names.map((name) => {
  const probe = document.body.appendChild(document.createElement('i'));
  probe.className = name;
  const [r, g, b] = getComputedStyle(probe).backgroundColor.match(/[\\d.]+/g).map((v) => {
    const s = v / 255;
    return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  });
  probe.remove();
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
})"""


@pages
def test_a_page_has_the_texts_for_screen_readers(name: str, files: dict[str, Path], page: Page):
    shown(page, files[name], 768)
    found = page.accessible()
    headings = [text for role, text in found if role == "heading"]
    assert headings[0].endswith(f": {'✓' if name == 'passed' else '✗'} {name}")
    for wanted in ("Where the worst error sits", "Figures"):
        assert wanted in headings
    pictures = [text for role, text in found if role in ("image", "img")]
    assert any(re.search(r"The worst error is in row \d+, column \d+", p) for p in pictures)
    for part in ("reference", "runtime", "difference"):
        assert any(re.search(rf"{part} of \w+: \d+ by \d+ elements", p) for p in pictures)
    assert all(pictures)
    tables = [text for role, text in found if role == "table"]
    assert len(tables) == (2 if name == "passed" else 3)
    assert all(tables)
    # Each cell of the cases is heard as one choice.
    choices = [text for role, text in found if role == "radio"]
    assert any(text.startswith("shape_B1") for text in choices)
    assert any(f": {name}, " in text for text in choices)


@pages
def test_keys_reach_and_scroll_what_is_wide(name: str, files: dict[str, Path], page: Page):
    shown(page, files[name], 360)
    reached = []
    for _ in range(12):
        page.press("Tab")
        label, outline, wide = page.evaluate(
            "((at) => [(at.ariaLabelledByElements?.[0]?.id) || at.tagName,"
            " getComputedStyle(at.tagName === 'INPUT' ? at.nextElementSibling : at).outlineStyle,"
            " at.scrollWidth > at.clientWidth + 20])(document.activeElement)"
        )
        reached.append(label)
        if label == "BODY":
            break
        assert outline != "none", label
        if wide and label != "INPUT":
            before = page.evaluate("document.activeElement.scrollLeft")
            page.press("ArrowRight")
            page.wait(f"document.activeElement.scrollLeft > {before}", 10)
    assert {"figures", "INPUT"} <= set(reached)


@pytest.mark.parametrize("width", [360, 1280])
def test_each_of_240_cells_is_reached_and_read_by_keys_and_touch(
    width: int, page: Page, tmp_path: Path
):
    names = [f"case_{i}_of_a_name_that_is_long_enough_to_need_two_lines" for i in range(240)]
    verdicts = tuple(verdict("r", "passed", 0.5, case=name) for name in names)
    file = tmp_path / "many.html"
    file.write_text(to_html(Report("many", (run("r"),), verdicts, ENVIRONMENT, ())))
    shown(page, file, width)
    page.evaluate("document.querySelector('input').focus()")
    for text in names[1:4]:
        page.press("ArrowRight")
        assert page.evaluate(READ) == [f"{text}: passed, 0.5"]
    assert page.evaluate(TOUCHED) == [f"{name}: passed, 0.5" for name in names]


READ = """[...document.querySelectorAll('.says')].filter((text) => {
  const { left, right, width } = text.getBoundingClientRect();
  return width > 1 && left >= 0 && right <= innerWidth && text.scrollHeight <= text.clientHeight;
}).map((text) => text.textContent)"""
"""The texts of cells that are shown whole."""

TOUCHED = f"""[...document.querySelectorAll('.cell')].flatMap((cell) => {{
  cell.scrollIntoView({{ block: 'center' }});
  const {{ left, top, width, height }} = cell.getBoundingClientRect();
  if (Math.min(width, height) < 24) return [];
  document.elementFromPoint(left + width / 2, top + height / 2).click();
  return {READ};
}})"""
"""What is read when each cell in turn is touched at its centre; it has at least 24 by 24 pixels."""


CLIPPED = """[...document.querySelectorAll('.wide, pre')]
  .filter((element) => element.scrollWidth > element.clientWidth + 1)
  .map((element) => element.textContent.slice(0, 40))"""

OVERFLOWS = """[...new Set([...document.querySelectorAll('.wide')]
  .map((element) => getComputedStyle(element).overflowX))]"""


@pages
def test_it_prints(name: str, files: dict[str, Path], page: Page, tmp_path: Path):
    shown(page, files[name], PAPER, unfolded=False)
    pdf = base64.b64decode(
        page.call("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)[
            "data"
        ]
    )
    (tmp_path / "page.pdf").write_bytes(pdf)
    assert pdf.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        # Nothing scrolls on paper: what is wider than the sheet would be cut off.
        assert page.evaluate("document.documentElement.scrollWidth") <= PAPER
        assert page.evaluate(CLIPPED) == []
        assert page.evaluate(OVERFLOWS) == ["visible"]
        assert page.evaluate(CONTRAST) == []
    finally:
        page.call("Emulation.setEmulatedMedia", media="")
