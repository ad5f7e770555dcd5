"""Specs as TOML."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import small_spec
from specs import make, refuses

from attn_export.errors import SpecError
from attn_export.spec import AttentionSpec


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"embed_dim: 32", ["is not TOML", "line 1"]),
        (b"\xff\xfe\x00\x01", ["is not TOML", "utf-8"]),
        (b"embed_dim = 32\nembed_dim = 64\n", ["is not TOML", "line 2"]),
        (b"", ["no 'embed_dim'"]),
        (b"embed_dim = 32\nnum_heads = 5\n", ["embed_dim 32", "num_heads 5"]),
        (b"embed_dim = 32\nnum_heads = 4\nscale = inf\n", ["scale", "inf"]),
        (b"embed_dim = 32\nnum_heads = 4\n[scale]\nx = 1\n", ["scale must be of type float"]),
    ],
)
def test_refuses_a_file_that_is_no_spec(tmp_path: Path, content: bytes, says: list[str]) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(SpecError) as error:
        AttentionSpec.from_toml(path)
    refuses(error, ["broken.toml", *says])


def test_refuses_a_path_that_is_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(SpecError) as error:
            AttentionSpec.from_toml(path)
        refuses(error, ["cannot read the spec", str(path)])


@pytest.mark.parametrize("text", ['"q,v"', '["v", "q"]', '" v,q"'])
def test_bias_in_a_file_is_text_or_a_list(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(f"embed_dim = 32\nnum_heads = 4\nbias = {text}\n")
    spec = AttentionSpec.from_toml(path)
    assert AttentionSpec.from_toml(str(path)) == spec
    assert spec.bias == "q,v"
    assert 'bias = "q,v"\n' in spec.to_toml()


def test_changes_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text("embed_dim = 32\nnum_heads = 4\n")
    assert AttentionSpec.from_toml(path, bias=["v", "q"]) == make(bias="q,v")
    assert AttentionSpec.from_toml(path, num_heads=8, bias=False) == make(num_heads=8, bias=False)


def test_written_spec_leaves_out_what_is_unset() -> None:
    for name in ("scale", "softcap", "window_left", "window_right"):
        assert name not in make().to_dict()
    assert "scale = 0.25\n" in make(scale=0.25).to_toml()
    assert AttentionSpec.from_dict(small_spec().to_dict()) == small_spec()
