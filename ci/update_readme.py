"""Copy the measured table from docs/results.md into the README, between its two marks.

python ci/update_readme.py [--check]
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: written by `make results`, do not edit -->", "<!-- /results -->"


def with_results(readme: str, results: str) -> str:
    """The README with the first table of the results and the machine it was measured on."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    lines = results.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    stop = lines.index("", start)
    facts = dict(
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines[stop:]
        if line.startswith("| ") and line.count("|") == 3
    )
    machine = f"Measured on {facts['CPU']}, {facts['Cores used']} cores, {facts['Date']}."
    return f"{head}{BEGIN}\n" + "\n".join(lines[start:stop]) + f"\n\n{machine}\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="1 if the README is not up to date")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    updated = with_results(readme.read_text(), (ROOT / "docs" / "results.md").read_text())
    if args.check:
        return int(updated != readme.read_text())
    readme.write_text(updated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
