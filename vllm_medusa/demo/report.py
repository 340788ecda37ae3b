"""From rounds to numbers and a table: pure functions, no engine in sight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_medusa.demo.engine import Generation, Variant, tokens_per_step
from vllm_medusa.demo.measure import DISTURBED, MAX_TOKENS, Round


@dataclass(frozen=True)
class Spread:
    """The median of some values and their quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What was found for one variant.

    Attributes:
        name: the variant's.
        tokens_per_second: decoding, the median prompt.
        ratio: to the first variant, prompt by prompt, over all prompts.
        ratio_chat: the same over the chat prompts alone.
        ratio_code: the same over the code prompts alone.
        ratio_with_prefill: as `ratio`, of the whole request's time instead of decoding alone.
        tokens_per_step: over all prompts.
        identical: answers that equal the first variant's, token by token.
    """

    name: str
    tokens_per_second: float
    ratio: Spread
    ratio_chat: Spread
    ratio_code: Spread
    ratio_with_prefill: Spread
    tokens_per_step: float
    identical: int


@dataclass(frozen=True)
class Report:
    """Everything that is printed and saved.

    Attributes:
        rows: one per variant, the first is the one the ratios refer to.
        prompts: how many were measured.
        disturbed: rounds beside which other processes were busy to the end.
        machine: from `describe_machine`.
        tokens_per_step_by_nodes: tree size and tokens per step, if they were counted.
    """

    rows: list[Row]
    prompts: int
    disturbed: int
    machine: dict[str, str]
    tokens_per_step_by_nodes: dict[int, float]


def summarize(variants: Sequence[Variant], rounds: Sequence[Round]) -> list[Row]:
    """One row per variant; the first variant is what the others are compared with."""
    return [
        summarize_variant(variant.name, index, rounds) for index, variant in enumerate(variants)
    ]


def summarize_variant(name: str, index: int, rounds: Sequence[Round]) -> Row:
    """The row of the variant that stands at `index` in every round."""
    own = [each.generations[index] for each in rounds]
    pairs = [(each.prompt.kind, each.generations[index], each.generations[0]) for each in rounds]
    ratios = [(kind, mine.tokens_per_second / base.tokens_per_second) for kind, mine, base in pairs]
    return Row(
        name=name,
        tokens_per_second=statistics.median(generation.tokens_per_second for generation in own),
        ratio=spread([ratio for _, ratio in ratios]),
        ratio_chat=spread([ratio for kind, ratio in ratios if kind == "chat"]),
        ratio_code=spread([ratio for kind, ratio in ratios if kind == "code"]),
        ratio_with_prefill=spread(
            [overall_speed(mine) / overall_speed(base) for _, mine, base in pairs]
        ),
        tokens_per_step=tokens_per_step(own),
        identical=sum(mine.token_ids == base.token_ids for _, mine, base in pairs),
    )


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; all the same for fewer than two values, not a number for none."""
    if len(values) < 2:
        only = values[0] if values else float("nan")
        return Spread(only, only, only)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def overall_speed(generation: Generation) -> float:
    """Tokens per second of the whole request, prefill included."""
    return generation.counts[-1] / generation.times[-1]


HEADINGS = ("", "tok/s", "ratio", "quartiles", "chat", "code", "whole", "tok/step", "same text")


def cells(report: Report) -> list[tuple[str, ...]]:
    """The table's rows as text, under `HEADINGS`."""
    return [
        (
            row.name,
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio.median:.2f}",
            f"{row.ratio.low:.2f}-{row.ratio.high:.2f}",
            f"{row.ratio_chat.median:.2f}",
            f"{row.ratio_code.median:.2f}",
            f"{row.ratio_with_prefill.median:.2f}",
            f"{row.tokens_per_step:.2f}",
            f"{row.identical} of {report.prompts}",
        )
        for row in report.rows
    ]


def explanation(report: Report) -> str:
    """What the columns mean and how they were measured."""
    text = (
        f"{report.prompts} prompts (MT-bench and HumanEval), up to {MAX_TOKENS} tokens, greedy, "
        "batch 1, float32. All engines were alive at once and took turns at every prompt. "
        "tok/s: decoding, without the prefill, the median prompt. ratio: to the first row, prompt "
        "by prompt, the median with its quartiles; then that of the chat and the code prompts "
        "alone, and that of the whole request, prefill included. tok/step: tokens per decoding "
        "step. same text: answers equal to the first row's, token by token. "
    )
    if report.disturbed:
        return text + (
            f"In {report.disturbed} of {report.prompts} rounds other processes kept more than "
            f"{DISTURBED} cores busy to the end: these ratios are less certain."
        )
    return text + f"No round was disturbed: other processes kept less than {DISTURBED} cores busy."


def markdown(report: Report) -> str:
    """The report as a page."""
    lines = ["# Measured by the demo", "", *markdown_table(HEADINGS, cells(report)), ""]
    lines += [explanation(report), ""]
    if report.tokens_per_step_by_nodes:
        by_nodes = report.tokens_per_step_by_nodes
        lines += ["## Tokens per step by size of the tree", ""]
        lines += markdown_table(
            ("nodes", *map(str, by_nodes)),
            [("tokens/step", *(f"{value:.2f}" for value in by_nodes.values()))],
        )
        lines += [
            "",
            "A property of heads, tree and text; the machine decides which size pays.",
            "",
        ]
    lines += ["## The machine", ""]
    lines += markdown_table(("", ""), list(report.machine.items()))
    return "\n".join(lines) + "\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(headings) + " |",
        "|" + "---|" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def as_json(report: Report, rounds: Sequence[Round]) -> dict[str, Any]:
    """The report and what it was made from, prompt by prompt, for `json.dump`."""
    return asdict(report) | {
        "rounds": [
            {
                "prompt": each.prompt.name,
                "kind": each.prompt.kind,
                "disturbed": each.disturbed,
                "variants": {
                    row.name: generation_as_json(generation)
                    for row, generation in zip(report.rows, each.generations, strict=True)
                },
            }
            for each in rounds
        ]
    }


def generation_as_json(generation: Generation) -> dict[str, float]:
    """What the table is made of, for one answer."""
    return {
        "tokens": generation.counts[-1],
        "steps": len(generation.counts),
        "prefill_seconds": round(generation.times[0], 4),
        "decode_seconds": round(generation.times[-1] - generation.times[0], 4),
        "tokens_per_second": round(generation.tokens_per_second, 3),
        "tokens_per_step": round(tokens_per_step([generation]), 4),
        "other_cores_busy": round(generation.others, 3),
    }
