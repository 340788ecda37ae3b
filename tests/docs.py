"""The documentation, taken apart for the tests that check it: links, headings, code, commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "heads").glob("*/README.md")),
]
# Where commands stand too, as comments.
SCRIPTS = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.sh")])

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A command that a page tells to run.

    Attributes:
        page: where it stands.
        words: program and arguments, without settings of the environment before it.
        whole: whether it is a line to be copied; else it is only mentioned, perhaps without all of
            its arguments.
    """

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    """A page without blocks of code and code spans, in which brackets are no links."""
    text = FENCE.sub("", text)
    lines = [line for line in text.splitlines() if not re.match(r" {4}(?! *[-*0-9])", line)]
    return re.sub("`[^`]*`", "code", "\n".join(lines))


def links(page: Path) -> list[str]:
    """The targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    cleaned = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in cleaned}


def python_blocks(page: Path) -> list[str]:
    return [code for _, language, code in FENCE.findall(page.read_text()) if language == "python"]


def code_spans(page: Path) -> list[str]:
    """What stands between backticks; line ends in it are spaces."""
    text = FENCE.sub("", page.read_text())
    return [" ".join(span.split()) for span in re.findall("`([^`]+)`", text)]


def shell_lines(text: str) -> Iterator[str]:
    """The lines of indented and of shell blocks, those that go on in the next one joined."""
    blocks = [code for _, language, code in FENCE.findall(text) if language in ("bash", "sh", "")]
    indented = [line for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    lines = iter([*"\n".join(blocks).splitlines(), *indented])
    for line in lines:
        line = line.strip()
        while line.endswith("\\") or _is_open(line):
            more = next(lines, None)
            if more is None:
                break
            line = f"{line.removesuffix(chr(92))} {more.strip()}"
        yield line


def _is_open(line: str) -> bool:
    """Whether a quotation goes on in the next line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return line.count("'") % 2 == 1 and "'{" in line
    return False


def commands(programs: tuple[str, ...]) -> list[Command]:
    """Every command of these programs on the pages and in the heads of scripts."""
    found = []
    for page in [*PAGES, *SCRIPTS]:
        text = page.read_text()
        if page.suffix != ".md":
            # Comments and docstrings: what is indented in them are commands.
            text = "\n".join(re.sub(r"^# ?", "", line) for line in text.splitlines())
        lines = [(line, True) for line in shell_lines(text)]
        if page.suffix == ".md":
            lines += [(span, False) for span in code_spans(page)]
        for line, whole in lines:
            for words in _split(line):
                if words[0] in programs:
                    found.append(Command(name(page), tuple(words), whole))
    return found


def _split(line: str) -> Iterator[list[str]]:
    """The commands of a line, also one in $(...)."""
    inner = re.search(r"\$\(([^()]+)\)", line)
    if inner:
        yield from _split(inner[1])
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words.pop(0)
    words = [word for word in words if not word.endswith("[@]}")]  # arrays of a shell script
    if words:
        yield words
