"""Style of docstrings: no question words, functions in the imperative, classes as noun phrases."""

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("plain_english")  # files are parsed once

ROOT = Path(__file__).parents[1]
QUESTION = re.compile(r"(What|Which|Whether|Why|How|Where|When|Who)\b")
PREPOSITION = re.compile(r"(Of|In|For|As|By|With|Under|Between|Beside|Below|At|On|From|To)\b")
NO_VERB = {
    *("A", "All", "An", "Another", "As", "At", "Both", "By", "Each", "Every", "For", "From", "In"),
    *("It", "Its", "No", "Not", "Of", "One", "Only", "Other", "Over", "Some", "The", "Two", "Who"),
    *("So", "That", "Their", "Those", "These", "With", "Where", "When", "Whoever"),
}
VERB = re.compile(r"[A-Z][a-z]+")
THIRD_PERSON = re.compile(
    r"(Adds|Asks|Brings|Chooses|Computes|Generates|Gives|Installs|Keeps|Makes|Mends|Puts|Remembers"
    r"|Rewrites|Rotates|Says|Speaks|Tells|Writes)\b"
)
Assigned = ast.Assign | ast.AnnAssign
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Node = Documented | Assigned


def sources(folder: str) -> Iterator[Path]:
    """Yield the Python files of a folder, programs without a suffix included."""
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix == ".py" or (path.suffix == "" and path.is_file() and is_program(path)):
            yield path


def is_program(path: Path) -> bool:
    """Return whether a file without a suffix is a Python program."""
    return path.read_bytes().split(b"\n", 1)[0].endswith(b"python3")


def docstrings(*folders: str) -> Iterator[tuple[str, Documented, str]]:
    """Yield the file and line, the node and the first line of every docstring."""
    for path in (path for folder in folders for path in sources(folder)):
        for node, text in docstrings_of_file(path):
            line = getattr(node, "lineno", 1)
            yield f"{path.relative_to(ROOT)}:{line}", node, text.split("\n", 1)[0]


@functools.cache
def docstrings_of_file(path: Path) -> list[tuple[Node, str]]:
    return list(docstrings_of(ast.parse(path.read_bytes())))


def docstrings_of(tree: ast.Module) -> Iterator[tuple[Node, str]]:
    """Yield the nodes with a docstring, constants and attributes included, and their docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)) is not None:
            yield node, text
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in itertools.pairwise(node.body):
                if isinstance(before, Assigned) and (text := text_of(after)) is not None:
                    yield before, text


def text_of(node: ast.stmt) -> str | None:
    """Return the text of a statement that is only a string."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return node.value.value.strip() if isinstance(node.value.value, str) else None
    return None


@pytest.mark.parametrize(
    "source",
    [
        '"""What it is."""',
        'def f():\n    """What it is."""',
        'X = 1\n"""What it is."""',
        'class C:\n    x: int\n    """What it is."""',
        'class C:\n    """A class."""\n    x: int = 1\n    """\n    What it is.\n    """',
    ],
)
def test_docstrings_that_ask_are_found(source: str):
    found = [line for node, line in docstrings_of(ast.parse(source)) if asks(node, line)]
    assert found == ["What it is."]


def is_property(node: Node) -> bool:
    """Return whether a node is a property, whose docstring may be a noun phrase."""
    names = (ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))
    return any(name.endswith(("property", ".setter")) for name in names)


def is_imperative(line: str) -> bool:
    """Return whether a line may open with a verb in the imperative."""
    word = re.split(r"[\s,.:;]", line, maxsplit=1)[0]
    inflected = word.endswith("s") and not word.endswith("ss")
    gerund = word.endswith("ing") and word != "Bring"
    return bool(VERB.fullmatch(word)) and word not in NO_VERB and not inflected and not gerund


def asks(node: Node, line: str) -> bool:
    """Return whether a docstring opens with a question word."""
    return bool(QUESTION.match(line))


def is_no_command(node: Node, line: str) -> bool:
    """Return whether a function's docstring does not open with a verb in the imperative."""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and not is_property(node) and not is_imperative(line)


def is_sentence(node: Node, line: str) -> bool:
    """Return whether the docstring of a class or module opens with a verb."""
    is_thing = isinstance(node, ast.Module | ast.ClassDef)
    return is_thing and bool(THIRD_PERSON.match(line))


def is_fragment(node: Node, line: str) -> bool:
    """Return whether the docstring of a constant lacks the noun that says what it is."""
    return isinstance(node, Assigned) and bool(PREPOSITION.match(line))


@pytest.mark.parametrize(
    ("is_wrong", "folders"),
    [
        (asks, ("attn_export", "scripts", "tests")),
        (is_fragment, ("attn_export", "scripts")),
        (is_no_command, ("attn_export", "scripts", "tests")),
        (is_sentence, ("attn_export", "scripts", "tests")),
    ],
)
def test_docstrings_open_in_plain_english(
    is_wrong: Callable[[Node, str], bool], folders: tuple[str, ...]
):
    found = list(docstrings(*folders))
    assert len(found) > 100
    wrong = [f"{place}: {line}" for place, node, line in found if is_wrong(node, line)]
    assert not wrong, "\n".join(wrong)


def help_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every option's help in a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield node.value.lineno, ast.unparse(node.value).lstrip("f'\"")


def opens_badly(text: str) -> bool:
    """Return whether a help text opens with a question word or a preposition."""
    return bool(QUESTION.match(text) or PREPOSITION.match(text))


def test_help_of_options_opens_with_a_noun_or_a_verb():
    texts = [
        (f"{path.name}:{line}", text)
        for path in sources("attn_export/cli")
        for line, text in help_texts(path.read_text(encoding="utf-8"))
    ]
    assert len(texts) > 50
    assert not [(place, text) for place, text in texts if opens_badly(text)]


@pytest.mark.parametrize("text", ["Which fails.", "Of the engine, as your program sets it."])
def test_help_that_opens_badly_is_found(text: str):
    ((_, found),) = help_texts(f"click.option('--x', help={text!r})")
    assert opens_badly(found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Return the shape.", True),
        ("Export, check and compare.", True),
        ("Bring the graph into canonical form.", True),
        ("Compress the weights.", True),
        ("The shape.", False),
        ("Returns the shape.", False),
        ("Returning the shape.", False),
        ("return the shape.", False),
        ("`[B, L]` as int64.", False),
    ],
)
def test_imperative_is_recognised(line: str, expected: bool):
    assert is_imperative(line) is expected


BANNED = ("house", "room", "rooms", "voice", "noun", "nouns", "told", "asked", "blame", "blamed")
"""Words that must not occur in names or docstrings, because they were used as metaphors."""


def names_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a file defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def words_of(name: str) -> set[str]:
    """Return the words of a name in snake case or camel case, in lower case."""
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def banned_words(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the word where a file has a banned word in a name or a docstring."""
    tree = ast.parse(source)
    for line, name in names_in(tree):
        yield from ((line, word) for word in words_of(name).intersection(BANNED))
    for node, text in docstrings_of(tree):
        found = re.findall(r"[a-z]+", text.lower())
        yield from ((getattr(node, "lineno", 1), word) for word in found if word in BANNED)


def test_names_and_docstrings_have_no_banned_words():
    files = [path for path in sources("attn_export") if "kits" not in path.parts]
    assert len(files) > 100
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in files
        for line, word in banned_words(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "def told(): ...",
        "class OwnVoice: ...",
        "x_room = 1",
        "def f(asked): ...",
        '"""A noun."""',
        'X = 1\n"""A noun."""',
    ],
)
def test_a_banned_word_is_found(source: str):
    assert list(banned_words(source))


def test_words_within_others_are_no_banned_words():
    assert not list(banned_words('"""Pronouns of the roommate."""\nroommate = warehouse = 1'))
