"""Tokens per step of sampled requests: fixed drafts, drawn drafts, typical acceptance.

Each way has an engine of its own, in a process of its own, and answers the same prompts with the
same tree at several temperatures. Tokens per step are counted, not timed: other processes on the
machine do not matter. Drafts come from the heads only (no lookup).

    python benchmarks/draft_sampling.py MODEL HEADS --output docs
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from vllm_medusa.bench.prompts import prompt_set
from vllm_medusa.bench.report import markdown_table
from vllm_medusa.machine import describe_machine

WAYS: dict[str, dict[str, str]] = {
    "fixed drafts": {"draft_sample_method": "greedy"},
    "drawn drafts": {"draft_sample_method": "probabilistic"},
    "typical (lossy)": {"rejection_sample_method": "typical"},
}
EXACT = ("fixed drafts", "drawn drafts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("heads")
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.2])
    parser.add_argument("--prompts", type=int, default=16, help="of chat and of code, each")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--output", type=Path, help="folder for draft-sampling.json and draft-sampling.md"
    )
    args = parser.parse_args()

    texts = [prompt.text for kind in ("chat", "code") for prompt in prompt_set(kind, args.prompts)]
    rows = []
    for nodes in args.nodes:
        found = {}
        for way, options in WAYS.items():
            found[way] = in_own_process(
                count, args.model, args.heads, nodes, options, texts, args.temperatures,
                args.max_tokens,
            )  # fmt: skip
            print(f"{nodes} nodes, {way}: {found[way]}", flush=True)
        rows += [
            {"nodes": nodes, "temperature": temperature} | {way: found[way][place] for way in WAYS}
            for place, temperature in enumerate(args.temperatures)
        ]
    result = {
        "machine": describe_machine(),
        "prompts": len(texts),
        "max_tokens": args.max_tokens,
        "rows": rows,
    }
    print(table(rows))
    if args.output:
        file = args.output / "draft-sampling"
        file.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(result))


def in_own_process(function: Any, *arguments: Any) -> Any:
    """Call a function in a fresh process: engines leave things behind."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def count(
    model: str,
    heads: str,
    nodes: int,
    options: dict[str, str],
    texts: list[str],
    temperatures: list[float],
    max_tokens: int,
) -> list[float]:
    """Mean tokens per step and request at each temperature, by vLLM's own counters."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=16,
        kv_cache_memory_bytes=2**30,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": "medusa",
            "model": heads,
            "num_speculative_tokens": nodes,
            "lookup": False,
            **options,
        },
    )
    chats = [[{"role": "user", "content": text}] for text in texts]
    found, before = [], counters(llm)
    for temperature in temperatures:
        sampling = [
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
            for number in range(len(texts))
        ]
        llm.chat(chats, sampling, use_tqdm=False)
        after = counters(llm)
        accepted, drafts = (now - then for now, then in zip(after, before, strict=True))
        found.append(round(1 + accepted / drafts, 3))
        before = after
    return found


def counters(llm: Any) -> tuple[int, int]:
    """Accepted drafts, and steps with drafts, so far."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return (
        values["vllm:spec_decode_num_accepted_tokens"],
        values["vllm:spec_decode_num_drafts"],
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    cells = [[str(value) for value in row.values()] for row in rows]
    return "\n".join(markdown_table(list(rows[0]), cells))


def verdict(rows: list[dict[str, Any]]) -> str:
    """Where drawn drafts get further than fixed ones."""
    fixed, drawn = EXACT
    better = [row for row in rows if row[drawn] > row[fixed]]
    places = ", ".join(f"{row['nodes']} nodes at {row['temperature']}" for row in better)
    return (
        f"Of the two exact ways, drawn drafts get further in {len(better)} of {len(rows)} rows"
        + (f" ({places})." if better else ".")
    )


def page(result: dict[str, Any]) -> str:
    """A page for docs/."""
    machine = "\n".join(f"- {key}: {value}" for key, value in result["machine"].items())
    return f"""# Sampled requests: which drafts, which rule

Made by benchmarks/draft_sampling.py: mean tokens per step and request, counted by vLLM, for
{result["prompts"]} prompts (chat and code), {result["max_tokens"]} tokens each at most, drafts from
the heads only. Fixed drafts are the heads' best tokens (`"draft_sample_method": "greedy"`), drawn
drafts are drawn from the heads at the request's temperature (`"probabilistic"`), typical is
`"rejection_sample_method": "typical"`, which is lossy. The default, `"auto"`, draws at temperatures
of 1 and more, without a seed. The same prompts, seeds and tree in each; a
number comes from {result["prompts"] * result["max_tokens"]} tokens at most, so small differences
are chance.

{machine}

{table(result["rows"])}

{verdict(result["rows"])} [Serving](serving.md#sampled-requests) says how to ask for each.
"""


if __name__ == "__main__":
    main()
