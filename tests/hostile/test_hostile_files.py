"""Files that were changed on purpose end in one clear line, whatever command reads them."""

from __future__ import annotations

from pathlib import Path

import hostile.surfaces  # noqa: F401 (it adds kinds)
import pytest
from hostile.bundles import MAKERS
from hostile.trial import tried

COUNTS = {"manifest": 20, "index": 10, "json_text": 10, "no_file": 10, "graph": 14, "tensors": 5}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.every(4)
def test_a_hostile_file_is_refused_by_one_line_or_does_no_harm(kind: str, bundle: Path, tmp_path):
    results = list(tried(bundle, tmp_path, range(COUNTS.get(kind, 4)), [kind]))
    assert [each for each in results if each.fate != "clean"] == []
