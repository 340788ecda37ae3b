"""The demo from beginning to end: serve, chat, measure, report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_medusa.demo.engine import Variant, tokens_per_step
from vllm_medusa.demo.machine import describe_machine
from vllm_medusa.demo.measure import MAX_TOKENS, Progress, Round, measure, running_engines
from vllm_medusa.demo.model import demo_model
from vllm_medusa.demo.picture import draw
from vllm_medusa.demo.prompts import Prompt, demo_prompts
from vllm_medusa.demo.report import (
    HEADINGS,
    Report,
    as_json,
    cells,
    explanation,
    markdown,
    summarize,
)
from vllm_medusa.demo.server import Server
from vllm_medusa.tree import TREE_FILE, stored_num_nodes

MAX_MODEL_LEN = 1024
QUESTION = "Why is the sky blue? Answer in three sentences."
TREE_SIZES = (1, 3, 7, 15, 63)

# Tokens per step depend neither on speed nor on the batch: no need to compile, nor for batch 1.
COUNTING_OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 16}


def medusa_variants(heads: Path, chain_nodes: int, tree_nodes: int | None) -> list[Variant]:
    """vLLM without speculation, a chain, and the tree stored beside the heads.

    Args:
        heads: folder of the heads.
        chain_nodes: length of the chain.
        tree_nodes: cut the tree to its first nodes; None takes as many as the tree's file says.
    """
    medusa = {"method": "medusa", "model": str(heads)}
    chain = medusa | {"tree": "chain", "num_speculative_tokens": chain_nodes}
    stored = heads / TREE_FILE
    nodes = tree_nodes or (stored_num_nodes(stored) if stored.is_file() else None)
    tree = medusa | {"num_speculative_tokens": nodes} if nodes else medusa
    return [
        Variant("plain vLLM", None),
        Variant(f"chain of {chain_nodes}", chain),
        Variant(f"tree of {nodes}" if nodes else "tree", tree),
    ]


def serve_and_chat(console: Console, model: Path, heads: Path) -> None:
    """Start `vllm serve` with Medusa, stream one answer, stop it.

    Raises:
        RuntimeError: if the server does not start, or does not end cleanly.
    """
    arguments = ["--speculative-model", f"medusa:{heads}", "--dtype", "float32"]
    arguments += ["--max-model-len", str(MAX_MODEL_LEN), "--shutdown-timeout", "20"]
    server = Server(model, arguments)
    console.print("$", " ".join(server.command), style="dim", highlight=False, soft_wrap=True)
    try:
        with console.status("waiting until it is healthy (compiles the model the first time)"):
            server.start()
        console.print(f"healthy at {server.base_url}; a chat through the OpenAI client:\n")
        console.print(f"[bold]{QUESTION}[/bold]")
        for piece in server.stream_chat(QUESTION, MAX_TOKENS):
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        console.print("\n")
        with console.status("stopping it as Ctrl-C does"):
            server.stop()
        console.print("stopped with SIGINT: ended cleanly, no process left")
    except BaseException:
        server.kill()
        raise


def measure_variants(
    console: Console, model: Path, variants: list[Variant], prompts: list[Prompt]
) -> list[Round]:
    """The paired measurement, with the progress in the terminal."""
    with (
        show_progress(console) as progress,
        running_engines(variants, model, progress, max_model_len=MAX_MODEL_LEN) as engines,
    ):
        return measure(engines, prompts, progress)


@contextlib.contextmanager
def show_progress(console: Console) -> Iterator[Progress]:
    """A line that changes with what is going on; where there is no terminal, lines."""
    if not console.is_terminal:
        yield console.print
        return
    with console.status("starting") as status:
        yield status.update


def count_tree_sizes(
    console: Console, model: Path, heads: Path, tree: Path | None, prompts: list[Prompt]
) -> dict[int, float]:
    """Tokens per step for the first 1, 3, 7, 15 and 63 nodes of a tree, one engine at a time.

    Args:
        tree: a JSON file with at least 63 nodes; None takes the one beside the heads.
    """
    medusa = {"method": "medusa", "model": str(heads)} | ({"tree": str(tree)} if tree else {})
    options = {"max_model_len": MAX_MODEL_LEN, **COUNTING_OPTIONS}
    counted = {}
    for nodes in TREE_SIZES:
        variant = Variant(f"{nodes} nodes", medusa | {"num_speculative_tokens": nodes})
        with (
            show_progress(console) as progress,
            running_engines([variant], model, progress, **options) as [engine],
        ):
            progress(f"counting tokens per step with {nodes} nodes")
            answers = engine.generate([prompt.text for prompt in prompts], MAX_TOKENS)
        counted[nodes] = tokens_per_step(answers)
        console.print(f"{nodes} nodes: {counted[nodes]:.2f} tokens per step")
    return counted


def print_table(console: Console, report: Report) -> None:
    """The report's table and what it means, in the terminal."""
    table = Table(*HEADINGS, box=box.SIMPLE_HEAD, padding=0)
    for row in cells(report):
        table.add_row(*row)
    console.print(table)
    console.print(explanation(report), style="dim", highlight=False)


def save(report: Report, rounds: Sequence[Round], folder: Path) -> list[Path]:
    """Write the page, the numbers and the picture; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers, picture = (folder / name for name in ("results.md", "results.json", "demo.png"))
    page.write_text(markdown(report))
    numbers.write_text(json.dumps(as_json(report, rounds), indent=1) + "\n")
    draw(report, rounds, picture)
    return [page, numbers, picture]


def run_demo(
    console: Console,
    heads: Path,
    output: Path,
    chain_nodes: int = 1,
    tree_nodes: int | None = None,
    serve: bool = True,
    sizes: bool = False,
    sizes_tree: Path | None = None,
) -> Report:
    """Everything, in order. The arguments are those of `vllm-medusa demo`.

    Raises:
        FileNotFoundError: if a package with the model or the prompts is missing.
        RuntimeError: if the server or an engine fails, with the end of its log.
    """
    console.rule("The model")
    model = demo_model(console.print)
    prompts = demo_prompts()
    console.print(f"{model}")
    if serve:
        console.rule("vllm serve with Medusa")
        serve_and_chat(console, model, heads)
    console.rule("Measuring")
    variants = medusa_variants(heads, chain_nodes, tree_nodes)
    rounds = measure_variants(console, model, variants, prompts)
    counted = count_tree_sizes(console, model, heads, sizes_tree, prompts) if sizes else {}
    report = Report(
        rows=summarize(variants, rounds),
        prompts=len(rounds),
        disturbed=sum(each.disturbed for each in rounds),
        machine=describe_machine(),
        tokens_per_step_by_nodes=counted,
    )
    print_table(console, report)
    for path in save(report, rounds, output):
        console.print(f"saved {path}")
    return report
