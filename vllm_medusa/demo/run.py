"""The demo from beginning to end: serve, chat, measure, report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from vllm_medusa.bench.calibration import read_calibration
from vllm_medusa.bench.prompts import SOURCES
from vllm_medusa.bench.report import Report, print_report, print_table, save
from vllm_medusa.bench.run import Bench, count_sizes, run_bench
from vllm_medusa.bench.sizes import Counts, size_headings, size_rows, sizes_markdown
from vllm_medusa.bench.variants import PLAIN, chain_variant, tree_variant
from vllm_medusa.demo.model import demo_model
from vllm_medusa.demo.prompts import demo_prompts
from vllm_medusa.demo.server import Server

MAX_MODEL_LEN = 1024
MAX_TOKENS = 128
QUESTION = "Why is the sky blue? Answer in three sentences."
TREE_SIZES = (1, 3, 7, 15, 63)


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


def demo_bench(model: Path, heads: Path) -> Bench:
    """What the demo measures: six chat and six code prompts, greedily, one at a time."""
    prompts = demo_prompts()
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    return Bench(
        title="Measured by the demo: SmolLM2-135M-Instruct",
        model=str(model),
        heads=heads,
        prompts={kind: [each for each in prompts if each.kind == kind] for kind in kinds},
        sources={kind: SOURCES[kind] for kind in kinds},
        max_tokens=MAX_TOKENS,
        options={"dtype": "float32", "max_model_len": MAX_MODEL_LEN},
        repeat="vllm-medusa demo",
    )


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
    console.print(f"{model}")
    if serve:
        console.rule("vllm serve with Medusa")
        serve_and_chat(console, model, heads)
    console.rule("Measuring")
    bench = demo_bench(model, heads)
    tree = tree_variant(heads, read_calibration(heads), tree_nodes)
    with tempfile.TemporaryDirectory() as folder:
        report = run_bench(
            console,
            bench,
            [PLAIN, chain_variant(heads, chain_nodes), tree],
            Path(folder) / "rounds.jsonl",
        )
    print_report(console, report)
    page = output / "results.md"
    saved = save(report, page, output / "results.json", output / "demo.png")
    if sizes:
        add_sizes(console, page, count_sizes(console, bench, TREE_SIZES, sizes_tree))
    for path in saved:
        console.print(f"saved {path}")
    return report


def add_sizes(console: Console, page: Path, counts: Counts) -> None:
    """Show tokens per step by size of the tree, and put them at the end of the page."""
    print_table(console, size_headings(counts), size_rows(counts))
    note = f"The prompts above, up to {MAX_TOKENS} tokens each, greedy."
    with page.open("a", encoding="utf-8") as file:
        file.write("\n" + sizes_markdown(counts, note))
