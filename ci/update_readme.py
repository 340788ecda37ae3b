"""Copy the measured tables from docs/ into the README, each between its two marks.

python ci/update_readme.py [--check]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLES = ("results", "load")  # docs/NAME.md


def with_table(readme: str, name: str, page: str) -> str:
    """The README with the first table of a page and the machine it was measured on."""
    begin = f"<!-- {name}: written by `make results`, do not edit -->"
    end = f"<!-- /{name} -->"
    head, _, rest = readme.partition(begin)
    _, _, tail = rest.partition(end)
    lines = page.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    stop = lines.index("", start)
    facts = dict(
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[stop:]
        if line.startswith("| ") and line.count("|") == 3
    )
    machine = f"Measured on {facts['CPU']}, {facts['Cores used']} cores, {facts['Date']}."
    return f"{head}{begin}\n" + "\n".join(lines[start:stop]) + f"\n\n{machine}\n{end}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="1 if the README is not up to date")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    updated = readme.read_text()
    for name in TABLES:
        updated = with_table(updated, name, (ROOT / "docs" / f"{name}.md").read_text())
    if args.check:
        return int(updated != readme.read_text())
    readme.write_text(updated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
