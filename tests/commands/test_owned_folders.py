"""`build` and `explain` replace a folder only if it is unchanged since they wrote it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_export.commands.main import run
from attn_export.output_folder import LIST, replaceable, write_list

COMMANDS = {
    "bundle": ["build", "--variant", "mqa", "--output"],
    "explanation": ["explain", "{bundle}", "--runtime", "ort-cpu", "--output"],
}
"""By what each writes."""


def _with(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("mine")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


def _add_to_list(folder: Path) -> None:
    path = next(path for path in (folder / LIST, folder / "manifest.json") if path.exists())
    content = json.loads(path.read_text())
    (folder / "mine").write_text("mine")
    content["files"]["mine"] = "0" * 64
    path.write_text(json.dumps(content))


def _another_kind(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "mine").write_text("mine")
    write_list(folder, "another kind")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (_with("notes.txt"), "holds notes.txt, which is not the "),
    "a hidden file": (_with(".notes"), "holds .notes, which is not the "),
    "a hidden folder": (lambda folder: (folder / ".git").mkdir(), "holds .git, which"),
    "an empty folder": (lambda folder: (folder / "build").mkdir(), "holds build, which"),
    "a link": (lambda folder: (folder / "l").symlink_to("/"), "holds l (a link), which"),
    "a dead link": (lambda folder: (folder / "l").symlink_to("no"), "holds l (a link), which"),
    "a pipe": (_pipe, "holds pipe (no plain file), which"),
    "a file in place of a folder's": (
        lambda folder: (shutil.rmtree(folder / "f"), _with("f")(folder)), "holds f, which"
    ),
    "a changed list": (_add_to_list, "exists and is no "),
    "a folder of another kind": (_another_kind, "exists and is no "),
}  # fmt: skip


def tree(folder: Path) -> dict[str, str]:
    """Return everything in a folder, with the contents of its files."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(errors="replace")
        if path.is_file() and not path.is_symlink()
        else str(path.is_symlink())
        for path in sorted(folder.rglob("*"))
    }


def written(kind: str, bundle: Path, folder: Path) -> None:
    """Make a folder as a command writes it; with a folder `f` in it."""
    if kind == "bundle":
        from attn_export.bundle.manifest import MANIFEST, manifest_content, write_manifest

        shutil.copytree(bundle, folder)
        (folder / "f").mkdir()
        (folder / "f" / "a").touch()
        content = manifest_content(folder)
        (folder / MANIFEST).unlink()
        write_manifest(folder, content)
    else:
        (folder / "f").mkdir(parents=True)
        (folder / "f" / "a").write_text("a")
        (folder / "explanation.json").write_text("{}")
        write_list(folder, kind)


def refused(kind: str, output: Path | str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must refuse its output folder; return its message."""
    assert run([*(word.format(bundle=bundle) for word in COMMANDS[kind]), str(output)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "choose another --output" in said or "move it away" in said or "rename it" in said
    return said


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_folder_in_which_something_is_not_its_own_is_refused(
    kind: str, change: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    written(kind, bundle, tmp_path / "out")
    alter, message = CHANGES[change]
    alter(tmp_path / "out")
    before = tree(tmp_path)
    assert message in refused(kind, tmp_path / "out", bundle, capsys)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_folder_in_which_a_file_was_changed_is_refused(
    kind: str, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    written(kind, bundle, tmp_path / "out")
    (tmp_path / "out" / "f" / "a").write_text("mine")
    assert f"f/a was changed since the {kind} was written" in refused(
        kind, tmp_path / "out", bundle, capsys
    )
    assert (tmp_path / "out" / "f" / "a").read_text() == "mine"


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("/", "/ is the current folder, or holds it"),
        (".", "is the current folder, or holds it"),
        ("..", "is the current folder, or holds it"),
        ("here", "is the current folder, or holds it"),
        ("../file", "exists and is not a folder"),
        ("../link to file", "exists and is not a folder"),
        ("../loop", "exists and is not a folder"),
        ("../b\udcff", "is not UTF-8"),
    ],
)
def test_a_place_that_no_folder_can_take_is_refused_before_the_work(
    kind: str, output: str, message: str, bundle: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link to file").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "here").symlink_to(".")
    monkeypatch.chdir(tmp_path / "cwd")
    before = tree(tmp_path)
    assert message in refused(kind, output, bundle, capsys)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", COMMANDS)
def test_new_empty_linked_and_own_folders_may_be_written(kind: str, bundle: Path, tmp_path: Path):
    from attn_export.bundle.manifest import _digests

    listed = _digests if kind == "bundle" else None
    (tmp_path / "empty").mkdir()
    written(kind, bundle, tmp_path / "own")
    (tmp_path / "link").symlink_to("own")
    for name in ("new", "empty", "own"):
        assert replaceable(tmp_path / name, kind, listed) == tmp_path / name
    assert replaceable(tmp_path / "link", kind, listed) == tmp_path / "own"


def test_a_file_put_into_a_bundle_while_it_is_built_anew_is_kept(bundle: Path, tmp_path: Path):
    from attn_export.bundle.manifest import staging
    from attn_export.errors import OutputError

    shutil.copytree(bundle, tmp_path / "out")
    with staging(tmp_path / "out") as stage:
        (tmp_path / "out" / "notes.txt").write_text("mine")
        with pytest.raises(OutputError, match=r"holds notes\.txt"):
            stage.publish()
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
