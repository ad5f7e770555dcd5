"""Large weights in ONNX Runtime: read from the mapped file, which sessions share."""

from __future__ import annotations

from pathlib import Path

import pytest
from subjects import shared_folder, stored

from attn_export.runtimes.engines import ort_cpu

ENTRY = "session.disable_prepacking"


@pytest.mark.parametrize(("more", "prepacks"), [(0, True), (-1, False)], ids=["at", "above"])
def test_weights_are_packed_up_to_a_size_of_the_files_beside_the_graph(
    more: int,
    prepacks: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
):
    graph: Path = stored("causal", shared_folder(tmp_path_factory)).folder / "model.onnx"
    size = sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file())
    monkeypatch.setattr(ort_cpu, "PREPACK_UP_TO", size + more)
    options = ort_cpu.OrtCpu().load(graph, 1).session.get_session_options()
    if prepacks:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry(ENTRY)
    else:
        assert options.get_session_config_entry(ENTRY) == "1"
