"""``vllm-medusa doctor``: what is installed here, what is wrong with it, and what mends it."""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_medusa.doctor.findings import ERROR, OK, Finding
from vllm_medusa.doctor.run import examine

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 where Medusa can be served here, perhaps slowly; else 1."""
    with Console(stderr=True).status("asking vLLM, half a minute"):
        findings = examine()
    works = all(finding.status != ERROR for finding in findings)
    if args.json:
        report = {"works": works, "findings": [dataclasses.asdict(each) for each in findings]}
        print(json.dumps(report, indent=2))
    else:
        print_report(Console(), findings)
    return 0 if works else 1


def print_report(console: Console, findings: Sequence[Finding]) -> None:
    """The table, then every problem with its command in a line of its own, to be copied."""
    table = Table(show_header=False)
    for _ in range(3):
        table.add_column()
    table.add_column(overflow="fold")  # paths can be longer than a line
    section = ""
    for finding in findings:
        if finding.section != section:
            table.add_section()
        shown = "" if finding.section == section else finding.section
        section = finding.section
        # Text: in a str, rich takes [bold] for markup, and paths may hold that.
        mark = Text(finding.status, style=STYLES[finding.status])
        table.add_row(Text(shown), Text(finding.name), mark, Text(finding.found))
    console.print(table)
    problems = [finding for finding in findings if finding.status != OK]
    for finding in problems:
        console.print()
        for line, style in (
            (f"{finding.status}: {finding.name}: {finding.found}", STYLES[finding.status]),
            (f"    {finding.remedy}", None),
        ):
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
    errors = sum(finding.status == ERROR for finding in problems)
    if errors:
        summary = f"{errors} to mend before Medusa can be served"
    elif problems:
        summary = f"Medusa can be served; {len(problems)} would make it faster or tidier"
    else:
        summary = "nothing wrong"
    console.print(f"\n{summary}", highlight=False)
