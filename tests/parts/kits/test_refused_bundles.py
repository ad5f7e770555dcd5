"""A bundle that `verify` refuses is refused by `kit` with the same words, in every language."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shared

from attn_export import verify
from attn_export.bundle.manifest import manifest_content, write_manifest
from attn_export.errors import BundleError
from attn_export.parts.kits.kit import LANGUAGES
from attn_export.parts.kits.kit_command import kit_command

Change = Callable[[Path, dict[str, Any]], object]


def index(change: Callable[[list[dict[str, Any]]], object]) -> Change:
    def edit(folder: Path, _: object) -> None:
        path = folder / "golden" / "index.json"
        content = json.loads(path.read_text())
        change(content["cases"])
        path.unlink()
        path.write_text(json.dumps(content))

    return edit


FORGED: dict[str, Change] = {
    "a case alone": index(lambda cases: cases.__delitem__(slice(1, None))),
    "a graph that nothing lists": lambda folder, _: shutil.copy(
        folder / "model.onnx", folder / "b.onnx"
    ),
    "an axis that is not fixed": lambda _, content: content["graphs"]["model.onnx"].update(
        fixed={"query_len": 1}
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_no_kit_is_written(name: str, tmp_path: Path):
    # Copies, not links: a file is truncated.
    bundle = Path(shutil.copytree(shared.bundle_of("append"), tmp_path / "bundle"))
    content = manifest_content(bundle)
    (bundle / "manifest.json").unlink()
    FORGED[name](bundle, content)
    write_manifest(bundle, content)
    with pytest.raises(BundleError) as refused:
        verify(bundle, runtimes=["ort-cpu"])
    for language in LANGUAGES:
        with pytest.raises(BundleError) as error:
            kit_command(language, bundle, tmp_path / "kit", dialect=None, quiet=True)
        assert str(error.value) == str(refused.value)
    assert not (tmp_path / "kit").exists()
