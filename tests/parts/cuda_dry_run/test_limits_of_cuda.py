"""The table of what `ort-cuda` cannot run, measured in dry runs, in both directions.

scripts/cuda_limits does the same for more types and architectures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT
from shared import extended

sys.path.append(str(ROOT / "tests" / "runtimes"))
from subjects import SUBJECTS, shared_folder, stored

from attn_export.parts.cuda_dry_run.dry_run import observe
from attn_export.parts.cuda_dry_run.dry_run_results import architectures_named
from attn_export.runtimes.engines.ort_cuda import ROUNDED_INPUTS, OrtCuda
from attn_export.runtimes.protocol import known_limit

pytestmark = pytest.mark.usefixtures("need_dry_run")

DEFAULT = ("causal", "cross, weights")
SIZES = 2, 3, 4


@pytest.mark.parametrize("arch", extended(("sm_80", "sm_75"), lambda arch: arch == "sm_80"))
@pytest.mark.parametrize("name", extended(SUBJECTS, lambda name: name in DEFAULT))
def test_cuda_does_what_its_table_says(
    name: str, arch: str, tmp_path_factory: pytest.TempPathFactory
):
    subject = stored(name, shared_folder(tmp_path_factory))
    (card,) = architectures_named([arch])
    for form in subject.forms:
        if ROUNDED_INPUTS in form.features:
            continue  # a dry run computes no numbers
        said = known_limit(OrtCuda(), form)
        found = observe(Path(subject.folder), form, card, SIZES).problem
        assert bool(said) == bool(found), (
            f"{form.name} of {name}: the table says {said or 'that it runs'!r}, "
            f"but {found or 'it is placed on CUDA'}; {', '.join(form.features)}"
        )
