"""`vllm-medusa bench MODEL HEADS`: vLLM with and without Medusa, side by side."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_medusa.cli.chat_template import read_chat_template
from vllm_medusa.cli.errors import print_error

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_medusa.bench.run import Bench

OUTPUT = Path("bench-results")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the sub-command."""
    parser.add_argument("model", metavar="MODEL", help="the target: a folder or a hub id")
    parser.add_argument("heads", metavar="HEADS", help="the heads: a folder or a hub id[@REVISION]")
    add = parser.add_argument_group("prompts").add_argument
    add("--sets", default=None, help="of chat,code,maths (default: all, or none with --data)")
    add("--data", type=Path, help="your own: JSON lines, the last user turn of each is answered")
    add("--prompts", type=positive, default=12, help="of each set (default: 12)")
    add("--chat-template", type=Path, help="Jinja file, for a model that has none")
    add = parser.add_argument_group("variants").add_argument
    add("--chain", type=positive, help="length of the chain (default: the best calibrated, else 1)")
    add("--tree", type=Path, action="append", default=[], help="JSON file of a tree; repeatable")
    add("--no-ngram", action="store_true", help="leave out vLLM's own prompt lookup")
    add = parser.add_argument_group("measurement").add_argument
    add("--temperatures", type=float, nargs="+", default=[0.0], help="(default: 0)")
    add(
        "--concurrency",
        type=positive,
        nargs="+",
        default=[1],
        help="requests that arrive together (default: 1)",
    )
    add("--max-tokens", type=positive, default=128, help="per answer (default: 128)")
    add("--dtype", default="auto", help="of the weights, as vLLM takes it (default: auto)")
    add("--eager", action="store_true", help="do not compile the model")
    add("--max-model-len", type=positive, default=2048, help="tokens (default: 2048)")
    add(
        "--sizes",
        type=positive,
        nargs="+",
        help="measure no speed; count tokens per step with the first so many nodes of the tree "
        "(the heads', or that of --tree)",
    )
    add(
        "--output",
        type=Path,
        default=OUTPUT,
        help=f"folder for page, numbers, picture and finished rounds (default: {OUTPUT}); a run "
        "that was stopped goes on there",
    )


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; 1 with a message on failure, 130 where it was stopped."""
    from rich.console import Console

    console = Console()
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        bench = bench_from(args)
        if args.sizes:
            count(console, args, bench)
        else:
            measure(console, args, bench)
    except (OSError, RuntimeError, ValueError) as error:
        print_error("bench", error)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with the finished rounds", file=sys.stderr)
        return 130
    return 0


def bench_from(args: argparse.Namespace) -> Bench:
    """What the options ask for.

    Raises:
        ValueError: a set that is not there, data or heads that cannot be used.
        FileNotFoundError: a package that carries prompts is not installed.
    """
    from vllm_medusa.bench.prompts import SOURCES, own_prompts, prompt_set
    from vllm_medusa.bench.run import Bench
    from vllm_medusa.heads.files import resolve_heads

    if args.sets is None:
        names = [] if args.data else list(SOURCES)
    else:
        names = [name.strip() for name in args.sets.split(",") if name.strip()]
    prompts = {name: prompt_set(name, args.prompts) for name in names}
    sources = {name: SOURCES[name] for name in names}
    if args.data:
        own, problems = own_prompts(args.data, args.prompts)
        for problem in problems:
            print(f"passed over: {problem}", file=sys.stderr)
        # By the whole name where a set has the same.
        kind = args.data.name if args.data.stem in prompts else args.data.stem
        prompts[kind], sources[kind] = own, f"{args.data.name} (--data)"
    if not prompts:
        raise ValueError("no prompts: name sets with --sets, or give your own with --data")
    if any(temperature < 0 for temperature in args.temperatures):
        raise ValueError("a temperature below 0 has no meaning")
    model = Path(args.model)
    most = max(args.concurrency)
    return Bench(
        title=f"{model.name} with Medusa",
        model=str(model.resolve()) if model.is_dir() else args.model,
        heads=resolve_heads(args.heads).resolve(),
        prompts=prompts,
        sources=sources,
        temperatures=args.temperatures,
        concurrency=args.concurrency,
        max_tokens=args.max_tokens,
        options={
            "dtype": args.dtype,
            "max_model_len": args.max_model_len,
            "enforce_eager": args.eager,
        }
        # vLLM's default holds at least as many; more must be asked for.
        | ({"max_num_seqs": most} if most > 128 else {}),
        chat_template=read_chat_template(args.chat_template),
        repeat=command_line(args),
    )


def measure(console: Console, args: argparse.Namespace, bench: Bench) -> None:
    """Rounds and report."""
    from vllm_medusa.bench.calibration import read_calibration
    from vllm_medusa.bench.report import print_report, save
    from vllm_medusa.bench.run import run_bench
    from vllm_medusa.bench.variants import (
        NGRAM,
        NGRAM_NAME,
        PLAIN,
        Variant,
        chain_variant,
        file_variants,
        heads_only,
        tree_variant,
    )

    calibration = read_calibration(bench.heads)
    tree = tree_variant(bench.heads, calibration)
    variants = [
        PLAIN,
        chain_variant(bench.heads, args.chain or calibration.best_chain()),
        heads_only(tree),
        tree,
        *file_variants(bench.heads, [file.resolve() for file in args.tree]),
    ]
    if not args.no_ngram:
        variants.append(Variant(NGRAM_NAME, NGRAM))
    report = run_bench(console, bench, variants, args.output / "rounds.jsonl")
    print_report(console, report)
    page, numbers, picture = (args.output / f"bench.{ending}" for ending in ("md", "json", "png"))
    saved = save(report, page, numbers, picture)
    console.print("saved", *map(str, saved), highlight=False, soft_wrap=True)
    if picture not in saved:
        console.print("no picture: pip install matplotlib, and the same command draws it")


def count(console: Console, args: argparse.Namespace, bench: Bench) -> None:
    """Tokens per step by number of nodes."""
    import json

    from vllm_medusa.bench.report import print_table
    from vllm_medusa.bench.run import count_sizes, settings_shown
    from vllm_medusa.bench.sizes import size_headings, size_rows, sizes_markdown

    if len(args.tree) > 1:
        raise ValueError("--sizes counts for one tree: give one --tree at most")
    tree = args.tree[0].resolve() if args.tree else None
    counts = count_sizes(console, bench, args.sizes, tree)
    both = count_sizes(console, bench, args.sizes, tree, lookup=True)
    counts |= {f"{kind}, with lookup": rates for kind, rates in both.items()}
    print_table(console, size_headings(counts), size_rows(counts))
    settings = settings_shown(bench)
    del settings["Compiled"]  # Counting never compiles.
    note = f"{settings['Prompts']} prompts, {settings['Tokens per answer']} tokens each, greedy."
    page = sizes_markdown(counts, note) + f"\nTo repeat it:\n\n    {bench.repeat}\n"
    (args.output / "sizes.md").write_text(page, encoding="utf-8")
    numbers = {"tokens_per_step": counts, "sources": bench.sources, "settings": settings}
    (args.output / "sizes.json").write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"saved {args.output / 'sizes.md'} and sizes.json")


def command_line(args: argparse.Namespace) -> str:
    """The command that measures again, with names in place of folders."""
    words = ["vllm-medusa", "bench", Path(args.model).name, Path(args.heads).name]
    for name, value in vars(args).items():
        option = "--" + name.replace("_", "-")
        if name in ("model", "heads", "output", "command", "run") or value in (None, False, []):
            continue
        if value is True:
            words.append(option)
        elif name == "tree":
            words += [word for file in value for word in (option, file.name)]
        else:
            values = value if isinstance(value, list) else [value]
            shown = [item.name if isinstance(item, Path) else f"{item}" for item in values]
            words += [option, *shown]
    return shlex.join(words)
