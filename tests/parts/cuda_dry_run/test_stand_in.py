"""Stand-in libraries: whatever the provider asks for is there, or is named."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from attn_export.errors import RuntimeFailure
from attn_export.parts.cuda_dry_run import install_cuda_stand_in as stand_in
from attn_export.parts.cuda_dry_run.install_cuda_stand_in import CUDA_STAND_IN
from attn_export.parts.installing import STAMP, VARIABLE, home

BUILT = home() / CUDA_STAND_IN


@pytest.fixture
def set_up(need_dry_run):
    return BUILT


@pytest.mark.parametrize("library", stand_in.LIBRARIES)
def test_every_function_that_the_provider_asks_for_has_a_stand_in(set_up, library):
    wanted = stand_in._required_symbols(stand_in._provider())
    assert len(wanted) > 100
    stand_in._check_symbols(library, wanted, stand_in._defined_symbols(BUILT / library))


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"cudaNew": "libcudart.so.13"}, "libcudart.so.13 lacks cudaNew, which"),
        ({"cublasB": "libcublas.so.13", "cublasA": "libcublas.so.13"}, "lacks cublasA and 1 more"),
    ],
)
def test_a_function_without_a_stand_in_is_named(wanted, says):
    (library,) = set(wanted.values())
    with pytest.raises(RuntimeFailure, match=says):
        stand_in._check_symbols(library, wanted, {"cudaMalloc"})


def test_a_provider_of_another_release_of_cuda_is_refused_by_its_library(tmp_path):
    library = tmp_path / "libcudart.so.14"
    _compile("", library, "-Wl,-soname,libcudart.so.14")
    provider = tmp_path / "provider.so"
    _compile("", provider, "-Wl,--no-as-needed", library)
    with pytest.raises(RuntimeFailure, match=r"is linked to libcudart\.so\.14, and there are"):
        stand_in._check_libraries(stand_in._linked_libraries(provider))


def _compile(code, path, *arguments):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", path, *arguments]
    subprocess.run(command, input=code, text=True, check=True)


@pytest.mark.parametrize(
    ("stamp", "says"),
    [
        (None, "are not built here; run scripts/setup_runtimes cuda-dry-run"),
        ("others", "for another onnxruntime; run scripts/setup_runtimes cuda-dry-run"),
    ],
)
def test_libraries_that_are_missing_or_outdated_come_with_the_remedy(
    set_up, tmp_path, monkeypatch, stamp, says
):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    if stamp:
        (tmp_path / CUDA_STAND_IN).mkdir()
        (tmp_path / CUDA_STAND_IN / STAMP).write_text(stamp)
    assert says in stand_in.not_ready()
