"""Plans of sweeps: lists stand for each of their items, and rules leave cells out."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_export.commands.main import run
from attn_export.errors import UsageError
from attn_export.parts.sweeps.sweep_plan import SweepPlan, read_plan

BASE = "[base]\nembed_dim = 32\nnum_heads = 4\n"


def plan_of(tmp_path: Path, text: str, **options: bool) -> SweepPlan:
    path = tmp_path / "heads.toml"
    path.write_text(text)
    return read_plan(path, **options)


def test_lists_stand_for_each_of_their_items(tmp_path: Path):
    plan = plan_of(
        tmp_path,
        'runtimes = ["ort-cpu", "tract"]\ndialects = ["standard", "portable"]\n'
        f'dtypes = ["float32", "float16"]\n{BASE}'
        '[[spec]]\nnum_kv_heads = [1, 2, 4]\ncache = ["none", "append"]\n[[spec]]\nhead_dim = 16\n',
    )
    assert plan.name == "heads"
    assert len(plan.sources) == 3 * 2 * 2 + 2
    assert len(plan.cells) == len(plan.sources) * 2 * 2
    assert len({cell.id for cell in plan.cells}) == len(plan.cells)
    assert {cell.dtype for cell in plan.cells} == {"float32", "float16"}
    assert all(cell.source.content["embed_dim"] == 32 for cell in plan.cells)


def test_a_runtime_has_the_cells_of_its_dialects_only(tmp_path: Path):
    runtimes = 'runtimes = ["tract", "ort-cpu"]\narchitectures = ["sm_80"]\n'
    cells = plan_of(tmp_path, f"{runtimes}{BASE}[[spec]]\n").cells
    found = {(cell.runtime, cell.dialect) for cell in cells}
    assert ("tract", "ort") not in found
    assert {("ort-cpu", "ort"), ("tract", "portable"), ("dry-run@sm_80", "cuda")} <= found


def test_numbers_of_a_list_field_are_one_value(tmp_path: Path):
    factors = "[1.0, 1.0, 1.0, 1.0]"
    text = (
        f'{BASE}rotary = "half"\nrotary_scaling = "longrope"\n[[spec]]\n'
        f"rotary_short_factors = {factors}\nrotary_long_factors = [{factors}, [2, 2, 2, 2]]\n"
    )
    assert len(plan_of(tmp_path, text).sources) == 2


EXCLUDES = [
    ('runtime = "tract"', {("ort-cpu", 1), ("ort-cpu", 4)}),
    ("num_kv_heads = 1", {("ort-cpu", 4), ("tract", 4)}),
    ('num_kv_heads = [1, 2]\nruntime = "tract"', {("ort-cpu", 1), ("ort-cpu", 4), ("tract", 4)}),
    ('runtime = ["tract", "ort-cpu"]\nnum_kv_heads = 4', {("ort-cpu", 1), ("tract", 1)}),
]


@pytest.mark.parametrize(("rule", "left"), EXCLUDES)
def test_a_rule_excludes_cells_of_which_all_is_true(rule: str, left: set, tmp_path: Path):
    text = f'runtimes = ["ort-cpu", "tract"]\ndialects = ["standard"]\n{BASE}[[spec]]\n'
    cells = plan_of(tmp_path, f"{text}num_kv_heads = [1, 4]\n[[exclude]]\n{rule}\n").cells
    assert {(cell.runtime, cell.source.content["num_kv_heads"]) for cell in cells} == left


def test_a_rule_excludes_specs_that_contradict_themselves(tmp_path: Path):
    text = f'{BASE}[[spec]]\ncross = [true, false]\ncache = ["none", "append"]\n'
    with pytest.raises(UsageError, match=r"cache = 'append' with cross = true.*\[\[exclude\]\]"):
        plan_of(tmp_path, text)
    plan = plan_of(tmp_path, f'{text}[[exclude]]\ncross = true\ncache = "append"\n')
    assert len(plan.sources) == 3


WRONG = [
        ("[[spec]]\nembed_dim = 32\n", "the spec has no 'num_heads'"),
        (f"{BASE}[[spec]]\nheads = 3\n", "a spec has no field 'heads'"),
        (f"{BASE}[[spec]]\n[[exclude]]\nspeed = 3\n", "names 'speed'"),
        (f"{BASE}[[spec]]\n[[exclude]]\n", "names nothing"),
        (f'runtimes = ["trt"]\n{BASE}[[spec]]\n', "unknown runtime 'trt'"),
        (f'dialects = ["fancy"]\n{BASE}[[spec]]\n', "unknown dialect 'fancy'"),
        (f'architectures = ["sm_1"]\n{BASE}[[spec]]\n', "sm_1"),
        (f"speed = 3\n{BASE}[[spec]]\n", "unknown field"),
        ("runtimes = 3\n", "not a plan of a sweep"),
        ("= 3\n", "not a plan of a sweep"),
        (BASE, "has no cells"),
        (f"{BASE}[[spec]]\nseed = 1\n", "a spec has no field 'seed'"),
        (f"{BASE}[[spec]]\nhead_dim = [{', '.join(map(str, range(1, 600)))}]\n"
         f"window_left = [{', '.join(map(str, range(400)))}]\n", "more than 200000 cells"),
        (BASE + f"[[spec]]\nhead_dim = [{'8, ' * 90_000}]\n" * 3, "more than 200000 cells"),
        (f"{BASE}[[spec]]\n[[exclude]]\nhead_dim = [{'8, ' * 1001}]\n", "more than 1000 values"),
        (f"{'a.' * 20_000}b = 1\n", "it has too many dots in a line"),
        (f"seed = 0x{'F' * 5000}\n", "an integer has more than 10000 bits"),
        (f"base = {'{a = ' * 150}1{'}' * 150}\n", "it is nested too deep"),
        ('name = "../x"\n', "name`, which is '../x'"),
        ('bundle = ["a\\n"]\n', "without such characters"),
        ("seed = -1\n", "seed`, which is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_plan_is_one_line(text: str, message: str, tmp_path: Path):
    with pytest.raises(UsageError, match=message) as error:
        plan_of(tmp_path, text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_modules_need_permission(tmp_path: Path):
    text = 'module = ["mine.py:make"]\n'
    with pytest.raises(UsageError, match="--allow-modules"):
        plan_of(tmp_path, text)
    (source,) = plan_of(tmp_path, text, allow_modules=True).sources
    assert (source.kind, source.content) == ("module", str(tmp_path / "mine.py:make"))


def test_shares_are_all_layers_once(tmp_path: Path):
    plan = plan_of(tmp_path, f"{BASE}[[spec]]\nhead_dim = [4, 8, 12, 16, 20]\n")
    shares = [plan.share(number, 3) for number in (1, 2, 3)]
    ids = [cell.id for share in shares for cell in share.cells]
    assert sorted(ids) == sorted(cell.id for cell in plan.cells)
    assert [len(share.sources) for share in shares] == [2, 2, 1]


def test_the_matrix_of_github_names_every_share(tmp_path: Path, capsys):
    path = tmp_path / "s.toml"
    path.write_text(f"{BASE}[[spec]]\nhead_dim = [4, 8, 12]\n")
    assert run(["sweep", str(path), "--matrix", "github", "--jobs", "2"]) == 0
    assert capsys.readouterr().out == '{"include": [{"share": "1/2"}, {"share": "2/2"}]}\n'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--share", "3/2"], "--share '3/2' must be I/N"),
        (["--share", "a"], "must be I/N"),
        (["--scheduler", "tcp://10.0.0.7:8786"], "is not on this machine"),
        (["--scheduler", "tls://127.0.0.1:8786"], "takes --tls-ca"),
        (["--scheduler", "example.org"], "is not an address"),
        (["--tls-ca", "x.pem"], "--tls-cert is missing"),
    ],
)
def test_wrong_options_are_one_line(options: list, message: str, tmp_path: Path, capsys):
    path = tmp_path / "s.toml"
    path.write_text(f"{BASE}[[spec]]\n")
    assert run(["sweep", str(path), *options, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
