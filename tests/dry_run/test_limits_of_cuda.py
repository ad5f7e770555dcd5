"""The table of what `ort-cuda` cannot run, measured in dry runs, in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT
from shared import extended

sys.path.append(str(ROOT / "tests" / "runtimes"))
from subjects import SUBJECTS, shared_folder, stored

from attn_export.dry_run.architectures import architectures_named
from attn_export.dry_run.observed import Observation
from attn_export.jobs.dry_run import observed
from attn_export.runtimes.ort_cuda import OrtCuda
from attn_export.runtimes.preflight import known_limit

pytestmark = pytest.mark.usefixtures("need_dry_run")

DEFAULT = ("causal", "cross, weights")
SIZES = 2, 3, 4


def what_is_wrong(found: Observation) -> str:
    """Return the reason that a graph does not count as run on CUDA; "" where none is known."""
    on_the_cpu = [node.operator for node in found.elsewhere if node.is_attention]
    if found.refused or on_the_cpu:
        return found.refused or f"on the CPU: {on_the_cpu}"
    # Without cuDNN, and without numbers that the device computes, nothing is known of the rest.
    return "".join(
        step.stopped for step in found.steps if "cuDNN" not in step.finding and not step.waits
    )


@pytest.mark.parametrize("arch", extended(("sm_80", "sm_75"), lambda arch: arch == "sm_80"))
@pytest.mark.parametrize("name", extended(SUBJECTS, lambda name: name in DEFAULT))
def test_cuda_does_what_its_table_says(
    name: str, arch: str, tmp_path_factory: pytest.TempPathFactory
):
    subject = stored(name, shared_folder(tmp_path_factory))
    (card,) = architectures_named([arch])
    for form in subject.forms:
        said = known_limit(OrtCuda(), form)
        found = what_is_wrong(observed(Path(subject.folder), form, card, SIZES))
        assert bool(said) == bool(found), (
            f"{form.name} of {name}: the table says {said or 'that it runs'!r}, "
            f"but {found or 'it is placed on CUDA'}; {', '.join(form.features)}"
        )
