"""The documentation: links lead somewhere, commands and options exist, Python blocks compile."""

import argparse
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import docs
from tests.docs import PAGES, ROOT
from vllm_medusa.cli.main import COMMANDS

NAMES = [docs.name(page) for page in PAGES]
PROGRAMS = ("vllm-medusa", "make", "python", "pip")
ALL_COMMANDS = docs.commands(PROGRAMS)


def of(program):
    found = [command for command in ALL_COMMANDS if command.words[0] == program]
    return pytest.mark.parametrize("command", found, ids=str)


def test_commands_are_found():
    """What the tests below look at is not nothing."""
    seen = {(command.page, *command.words[:2]) for command in ALL_COMMANDS if command.whole}
    assert ("README.md", "make", "demo") in seen
    assert ("README.md", "python", "-m") in seen
    assert ("docs/training.md", "vllm-medusa", "train") in seen
    assert ("docs/serving.md", "python", "examples/client.py") in seen
    assert ("examples/offline.py", "python", "examples/offline.py") in seen
    assert len(ALL_COMMANDS) > 50


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for link in docs.links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme in ("http", "https") and parts.netloc, link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.exists(), f"{link}: no such file"
        if parts.fragment:
            assert parts.fragment in docs.anchors(target), f"{link}: no such heading"


def test_every_page_can_be_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        for link in docs.links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                new.add(target)
    assert set(PAGES) <= reached


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_compile(page):
    for code in docs.python_blocks(page):
        compile(code, docs.name(page), "exec")


def parser_of(name):
    parser = argparse.ArgumentParser(prog=name, exit_on_error=False)
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    return parser


@of("vllm-medusa")
def test_our_commands(command):
    if len(command.words) == 1 or "..." in command.words:
        return  # the program's name, a message
    name, *arguments = command.words[1:]
    assert name in COMMANDS, name
    parser = parser_of(name)
    if command.whole:
        parser.parse_args(arguments)  # wrong arguments end in SystemExit
    else:
        known = parser._option_string_actions
        assert all(word in known for word in arguments if word.startswith("--"))


@of("make")
def test_make_targets(command):
    targets = re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in command.words[1:]:
        assert word in targets or re.match("[A-Z]+=", word), word


def modules_own(words):
    """The source that reads a Python command's arguments, and these; None for others' modules."""
    if words[1] == "-m":
        module, arguments = words[2], words[3:]
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"no module {module}"
        if not module.startswith("vllm_medusa"):
            return None
        return spec.origin, arguments
    script = ROOT / words[1]
    assert script.is_file(), words[1]
    return script, words[2:]


@of("python")
def test_python_commands(command):
    if len(command.words) < 3 and not command.whole:
        return
    own = modules_own(command.words)
    if own is not None:
        source = Path(own[0]).read_text()
        for word in own[1]:
            if word.startswith("--"):
                assert f'"{word}"' in source, word


@of("pip")
def test_pip_extras_exist(command):
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for word in command.words:
        if match := re.fullmatch(r"vllm-medusa\[(\w+)\]", word):
            assert match[1] in extras


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_that_are_named_exist(page):
    """Code spans that are a path to a file of this project."""
    for span in docs.code_spans(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|sh|cpp|json|md)", span):
            if "VERSION" in span or "HEADS" in span:
                continue
            places = [ROOT / span, ROOT / "vllm_medusa" / span, ROOT / "tests" / span]
            assert any(place.exists() for place in places), span


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_environment_variables_of_ours_exist(page):
    sources = "".join(path.read_text() for path in (ROOT / "vllm_medusa").rglob("*.py"))
    for variable in re.findall(r"VLLM_MEDUSA_\w+", page.read_text()):
        assert variable in sources, variable
