"""docs/troubleshooting.md has every message of ours, and no message that is none.

Messages are found in the syntax tree of the package: what is raised, warned of, or collected as a
problem. The page quotes fragments of them with "..." for what varies, so that a message may be
reworded around a fragment.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_medusa"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()

GAP = "..."
# A fragment with fewer letters says nothing, unless the message has no more.
FEWEST_LETTERS = 12

COLLECTED_IN = {"problems", "warnings", "lacking"}


def constants() -> dict[str, str]:
    """Texts and numbers of module-level names, such as the names of files in messages."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id.isupper():
                        found[target.id] = str(node.value.value)
    return found


CONSTANTS = constants()


def text_of(node: ast.expr | None) -> str | None:
    """A message with "..." for what varies; None where it is no text that stands there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(str(part.value))
            else:
                assert isinstance(part, ast.FormattedValue)
                name = part.value.id if isinstance(part.value, ast.Name) else ""
                parts.append(CONSTANTS.get(name, GAP))
        return "".join(parts)
    if isinstance(node, ast.BinOp):
        left = text_of(node.left)
        return None if left is None else left + (text_of(node.right) or GAP)
    if isinstance(node, ast.Call) and node.args:  # self.failure("...")
        return text_of(node.args[0])
    return None


def messages_in(path: Path) -> Iterator[tuple[int, str | None]]:
    """Line and text of every message in a module."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        returns = ast.unparse(function.returns or ast.Constant(None))
        # Of checkpoints all problems are collected and shown at once.
        returns_lines = returns == "list[str]" and "heads" in path.parts
        names = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            for expression in expressions(node, returns_lines, function.name):
                if isinstance(expression, ast.Name):
                    expression = names.get(expression.id, expression)
                yield node.lineno, text_of(expression)


def expressions(node: ast.AST, returns_lines: bool, function: str) -> Iterator[ast.expr]:
    """The expressions of a node that are shown to people."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        name = ast.unparse(node.exc.func)
        if name.endswith("Error") and not name.endswith("ArgumentTypeError"):
            yield node.exc.args[0]
    elif isinstance(node, ast.Yield) and function.endswith("_problems") and node.value:
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        receiver = ast.unparse(node.func.value).split(".")[-1]
        if node.func.attr == "append" and receiver in COLLECTED_IN:
            yield node.args[0]
        if receiver == "logger" and node.func.attr.startswith("warning"):
            yield node.args[0]
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call) and node.value.args:
        if ast.unparse(node.value.func).endswith("Error"):
            yield node.value.args[0]
    elif isinstance(node, ast.Return) and returns_lines and isinstance(node.value, ast.List):
        yield from node.value.elts
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.ListComp):
        names = {ast.unparse(target) for target in node.targets}
        yield from [node.value.elt] if names <= COLLECTED_IN else []


def one_line(text: str) -> str:
    return " ".join(text.replace('"', "").split())


def all_messages() -> dict[str, str]:
    """Message -> where it is."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for line, text in messages_in(path):
            if text and re.search("[a-z]", text.replace(GAP, "")):
                found.setdefault(one_line(text), f"{path.relative_to(ROOT)}:{line}")
    return found


MESSAGES = all_messages()
FRAGMENTS = [
    one_line(fragment)
    for row in re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    for fragment in re.findall("`(.*?)`", row)
]


def fits(fragment: str, message: str) -> bool:
    """Whether a message has all parts of a fragment, in order."""
    if fragment.strip(" .:") == message.strip(" .:"):
        return True
    if sum(map(str.isalpha, fragment)) < FEWEST_LETTERS:
        return False
    parts = [re.escape(part) for part in fragment.split(GAP) if part.strip()]
    return re.search(".*".join(parts), message) is not None


def test_messages_are_found():
    """Of each kind one, so that the search itself is known to work."""
    known = ("medusa needs heads", "tree repeats the nodes", "block size", "data parallel size",
             "differs from the release", "missing; expected", "was chosen elsewhere",
             "still ran", "values are NaN", "the tensors say", "too little memory")  # fmt: skip
    for words in known:
        assert any(words in message for message in MESSAGES), words
    assert len(MESSAGES) > 150


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_is_on_the_page(message):
    assert any(fits(fragment, message) for fragment in FRAGMENTS), (
        f"docs/troubleshooting.md says nothing of the message in {MESSAGES[message]}: add a row "
        f"with a fragment of it, '...' for what varies, and what to do\n  {message}"
    )


def test_every_row_is_a_message():
    stale = [each for each in FRAGMENTS if not any(fits(each, message) for message in MESSAGES)]
    assert not stale


@pytest.mark.parametrize("module", ["support.py", "attention/layers.py"])
def test_every_refused_feature_is_on_the_page(module):
    """Features stand as keys of dicts, each with whether it is there."""
    keys = [
        text_of(key)
        for node in ast.walk(ast.parse((PACKAGE / module).read_text()))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if ast.unparse(node.targets[0]) in ("found", "off")
        for key in node.value.keys
    ]
    assert len(keys) > 5
    for key in keys:
        for part in key.split(GAP):
            assert part.strip() in PAGE, f"{module}: {key}"
