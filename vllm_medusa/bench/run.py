"""A benchmark from beginning to end: engines, rounds, report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.bench.calibration import read_calibration
from vllm_medusa.bench.measure import measure, running_engines
from vllm_medusa.bench.progress import show_progress
from vllm_medusa.bench.report import Report
from vllm_medusa.bench.rounds import RoundFile, plan
from vllm_medusa.bench.sizes import COUNTING_OPTIONS, Counts, count_tree_sizes
from vllm_medusa.bench.summary import summarize
from vllm_medusa.bench.variants import Variant, medusa
from vllm_medusa.demo.prompts import Prompt
from vllm_medusa.machine import describe_machine


@dataclass(frozen=True)
class Bench:
    """What is to be measured.

    Attributes:
        title: of the report.
        model: the target, as vLLM takes it.
        heads: folder of the heads.
        prompts: by set.
        sources: by set, where the prompts come from and under which licence.
        temperatures: of sampling; 0 is greedy.
        concurrency: numbers of requests that arrive together.
        max_tokens: where answers are cut.
        options: keyword arguments for `vllm.LLM`.
        chat_template: the text of a template to use in place of the model's own.
        repeat: the command that measures again.
    """

    title: str
    model: str
    heads: Path
    prompts: Mapping[str, Sequence[Prompt]]
    sources: Mapping[str, str]
    temperatures: Sequence[float] = (0.0,)
    concurrency: Sequence[int] = (1,)
    max_tokens: int = 128
    options: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    repeat: str = ""


def run_bench(
    console: Console, bench: Bench, variants: Sequence[Variant], rounds_file: Path
) -> Report:
    """Measure what is not in the file of rounds yet, and sum all of it up.

    Args:
        console: for progress.
        bench: what to measure.
        variants: how; the first is what the others are compared with.
        rounds_file: where finished rounds are kept; made if it is not there.

    Raises:
        BenchError: the file holds rounds made with other settings.
        RuntimeError: an engine failed; with the reason, or the end of its log.
    """
    done = RoundFile(rounds_file, fingerprint(bench, variants))
    tasks = plan(bench.prompts, bench.temperatures, bench.concurrency)
    finished = {each.task for each in done.rounds}
    if finished:
        console.print(f"{len(finished)} of {len(tasks)} rounds are in {rounds_file} already")
    if any(task.name not in finished for task in tasks):
        with (
            show_progress(console) as progress,
            running_engines(
                variants, bench.model, progress, bench.chat_template, **bench.options
            ) as engines,
        ):
            measure(engines, tasks, bench.max_tokens, done, progress)
    return Report(
        title=bench.title,
        rows=summarize(variants, done.rounds, read_calibration(bench.heads)),
        rounds=done.rounds,
        variants=[variant.name for variant in variants],
        sources=dict(bench.sources),
        settings=settings_shown(bench),
        machine=describe_machine(),
        repeat=bench.repeat,
    )


def count_sizes(
    console: Console,
    bench: Bench,
    sizes: Sequence[int],
    tree: Path | None = None,
    lookup: bool = False,
) -> Counts:
    """Tokens per step by number of nodes, in one engine.

    Args:
        console: for progress.
        bench: model, heads, prompts and options; the rest has no part in it.
        sizes: numbers of nodes.
        tree: a JSON file of a tree that is large enough; None takes the one beside the heads.
        lookup: let drafts come from the request's own text too, as serving does.

    Raises:
        RuntimeError: the engine failed, for example because the tree has too few nodes.
    """
    options = medusa(bench.heads) | {"num_speculative_tokens": max(sizes), "lookup": lookup}
    options |= {"tree": str(tree)} if tree else {}
    engine_options = dict(bench.options) | COUNTING_OPTIONS
    variant = Variant(f"tree of {max(sizes)}", options)
    with (
        show_progress(console) as progress,
        running_engines(
            [variant], bench.model, progress, bench.chat_template, **engine_options
        ) as [engine],
    ):
        return count_tree_sizes(engine, bench.prompts, sizes, bench.max_tokens, progress)


def settings_shown(bench: Bench) -> dict[str, str]:
    """The settings that a reader needs; names of folders, not where they are."""
    options = bench.options
    counts = (f"{len(members)} {kind}" for kind, members in bench.prompts.items())
    return {
        "Model": Path(bench.model).name,
        "Heads": bench.heads.name,
        "Type of the weights": str(options.get("dtype", "auto")),
        "Compiled": "no (eager)" if options.get("enforce_eager") else "yes",
        "Prompts": ", ".join(counts),
        "Tokens per answer": f"up to {bench.max_tokens}",
    }


def fingerprint(bench: Bench, variants: Sequence[Variant]) -> dict[str, Any]:
    """What must be the same for two rounds to stand side by side."""
    prompts = {kind: list(map(asdict, members)) for kind, members in bench.prompts.items()}
    machine = describe_machine()
    del machine["Date"]
    return {
        "model": bench.model,
        "heads": files_in(bench.heads),
        "variants": [asdict(variant) for variant in variants],
        "prompts": digest(json.dumps(prompts)),
        "temperatures": list(bench.temperatures),
        "concurrency": list(bench.concurrency),
        "max tokens": bench.max_tokens,
        "engine options": dict(bench.options),
        "chat template": digest(bench.chat_template or ""),
        "machine": machine,
    }


def files_in(folder: Path) -> dict[str, list[int]]:
    """Name -> size and time of change of the files in a folder: tells whether one has changed."""
    return {
        file.name: [file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(folder.iterdir())
        if file.is_file()
    }


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
