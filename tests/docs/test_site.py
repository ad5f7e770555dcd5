"""The site: built from docs/ with warnings as errors, and complete."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shared
from conftest import ROOT

import attn_export

LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site() -> Path:
    def make(folder: Path) -> None:
        # It writes into the folder of its configuration, and reads no links.
        shutil.copytree(ROOT / "docs", folder / "docs")
        shutil.copy(ROOT / "mkdocs.yml", folder)
        done = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    return shared.once("site", make) / "site"


def anchors(page: Path) -> set[str]:
    return set(re.findall(r' id="([^"]+)"', page.read_text(encoding="utf-8")))


def test_every_page_is_on_the_site(site: Path):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 10
    assert {page for page in pages if not (site / page.with_suffix(".html")).is_file()} == set()


def test_links_of_the_pages_lead_to_files_and_anchors_that_are_there(site: Path):
    found = 0
    for page in site.rglob("*.html"):
        body = page.read_text(encoding="utf-8").split("<article", 1)[-1].split("</article>")[0]
        for target in re.findall(r'(?:href|src)="([^"]+)"', body):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            there = (page.parent / name).resolve() if name else page
            assert there.is_file(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}"
            found += 1
    assert found > 100


def test_links_of_the_readme_lead_to_files_and_anchors_that_are_there(site: Path):
    text = (ROOT / "README.md").read_text()
    own = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
           for title in re.findall(r"^#+ (.+)$", text, flags=re.M)}  # fmt: skip
    targets = LINK.findall(text)
    assert len(targets) > 20
    for target in targets:
        name, _, anchor = target.partition("#")
        assert not name or (ROOT / name).is_file(), target
        if name and anchor:
            page = site / Path(name).relative_to("docs").with_suffix(".html")
            assert anchor in anchors(page), target
        elif anchor:
            assert anchor in own, target


def test_pages_fetch_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', text)
        loaded += re.findall(r'<link rel="(?:stylesheet|icon|preconnect)" href="([^"]+)"', text)
        assert loaded
        assert [url for url in loaded if re.match(r"(\w+:)?//", url)] == [], page.name


@pytest.mark.parametrize("name", attn_export.__all__)
def test_every_public_name_is_in_the_api_reference(site: Path, name: str):
    page = (site / "api.html").read_text(encoding="utf-8")
    assert re.search(rf"<td><code>{name}[(<]", page)
