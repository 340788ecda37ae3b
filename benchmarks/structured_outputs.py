"""What trees give requests with a grammar: tokens per step and speed-up, by tree size.

One engine, in this process. Every task is answered greedily with trees of 0 (no speculation), 1,
3, ... nodes in turn: as JSON with drafts of the heads only, as JSON with chains from the text too,
and in free text.

    python benchmarks/structured_outputs.py MODEL HEADS --output docs
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_process import start

from vllm_medusa.calibration.live import model_runner, set_tree_size
from vllm_medusa.load import LoadMeter
from vllm_medusa.machine import describe_machine

# Name, whether there is a grammar, whether there are chains from the text.
KINDS = (("JSON, heads only", True, False), ("JSON", True, True), ("free text", False, True))

# Above this many cores kept busy by others, times say nothing.
QUIET = 0.2

TEXT = {"type": "string", "maxLength": 40}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
LETTER = (
    "Dear Ms Weber, my name is Ana Silva, I am 34 years old and live in Porto. On 3 May I bought "
    "two lamps for 89 euros, order number 4711. One of them is broken. Yours, Ana Silva"
)


def object_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def list_of(items: dict[str, Any], number: int) -> dict[str, Any]:
    """The schema of a list of so many items."""
    return {"type": "array", "items": items, "minItems": number, "maxItems": number}


# What people use JSON for: pull facts out of a text, invent records, classify, list.
TASKS: list[tuple[str, dict[str, Any]]] = [
    (
        f"Write down who wrote this letter, as JSON.\n\n{LETTER}",
        object_of(name=TEXT, age=NUMBER, city=TEXT),
    ),
    (
        f"Write down the order that this letter is about, as JSON.\n\n{LETTER}",
        object_of(order_number=NUMBER, items=list_of(object_of(name=TEXT, count=NUMBER), 1),
                  price=NUMBER, is_complaint={"type": "boolean"}),
    ),
    (
        "Invent three people, as JSON.",
        list_of(object_of(name=TEXT, age=NUMBER, city=TEXT), 3),
    ),
    (
        "List the four seasons with a short description of each, as JSON.",
        list_of(object_of(season=TEXT, description={"type": "string", "maxLength": 80}), 4),
    ),
    (
        "Write a recipe for pancakes, as JSON.",
        object_of(title=TEXT, ingredients=list_of(object_of(name=TEXT, amount=TEXT), 5),
                  minutes=NUMBER),
    ),
    (
        f"What does the writer of this letter feel, and how sure are you, as JSON?\n\n{LETTER}",
        object_of(
            feeling={"enum": ["happy", "angry", "sad", "neutral"]},
            percent={"type": "integer", "minimum": 0, "maximum": 100},
            reason={"type": "string", "maxLength": 120},
        ),
    ),
    (
        "Plan a weekend in Lisbon, as JSON.",
        object_of(days=list_of(object_of(day=TEXT, activities=list_of(TEXT, 3)), 2)),
    ),
    (
        "List five programming languages with the year they appeared, as JSON.",
        list_of(object_of(language=TEXT, year=NUMBER, compiled={"type": "boolean"}), 5),
    ),
]  # fmt: skip


@dataclass
class Run:
    """One answer: its tokens, decoding steps, their seconds, and the nodes scheduled in them."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    nodes: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("heads")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3, 5, 7, 15])
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--output", type=Path, help="folder for structured-outputs.json and structured-outputs.md"
    )
    args = parser.parse_args()

    llm = start(args.model, args.heads, max(args.nodes), args.eager)
    sizes = [0, *args.nodes]
    runs: dict[tuple[int, str], list[Run]] = {
        (size, kind): [] for size in sizes for kind, *_ in KINDS
    }
    drafter = model_runner(llm).drafter
    meter = LoadMeter()
    started = time.process_time()
    for number, (text, schema) in enumerate(TASKS):
        for turn in range(len(sizes)):
            size = sizes[(number + turn) % len(sizes)]
            for kind, grammar, lookup in KINDS:
                drafter.config.lookup = lookup
                name = f"{number}-{size}-{kind}"
                run = answer(llm, name, text, schema if grammar else None, size, args.max_tokens)
                runs[size, kind].append(run)
        print(f"task {number + 1} of {len(TASKS)}", flush=True)
    others = meter.others(time.process_time() - started)
    result = {
        "machine": describe_machine(),
        "cores kept busy by other processes": round(others, 3),
        "tasks": len(TASKS),
        "max_tokens": args.max_tokens,
        "compiled": not args.eager,
        "sizes": [summarise(size, runs, with_times=others < QUIET) for size in sizes],
    }
    print(table(result))
    if args.output:
        file = args.output / "structured-outputs"
        file.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        file.with_suffix(".md").write_text(page(result))


def answer(llm: Any, name: str, text: str, schema: Any, size: int, max_tokens: int) -> Run:
    """Answer one task with trees of one size; the prefill's step is left out."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    set_tree_size(scheduler, size)
    prompt = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    grammar = StructuredOutputsParams(json=schema) if schema else None
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=grammar)
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    run, known = Run(), 0
    while engine.has_unfinished_requests():
        drafts = [len(request.spec_token_ids) for request in scheduler.running]
        begun = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - begun
        now = len(outputs[0].outputs[0].token_ids) if outputs else known
        if known:
            run.tokens += now - known
            run.steps += 1
            run.seconds += seconds
            run.nodes += sum(drafts)
        known = now
    return run


def summarise(
    size: int, runs: dict[tuple[int, str], list[Run]], with_times: bool
) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"nodes": size}
    for kind, *_ in KINDS:
        here, alone = runs[size, kind], runs[0, kind]
        steps = sum(run.steps for run in here)
        speeds = [
            (run.tokens / run.seconds) / (base.tokens / base.seconds)
            for run, base in zip(here, alone, strict=True)
        ]
        row[f"{kind}: tokens per step"] = round(sum(run.tokens for run in here) / steps, 3)
        row[f"{kind}: nodes per step"] = round(sum(run.nodes for run in here) / steps, 2)
        row[f"{kind}: speed-up"] = round(statistics.median(speeds), 3) if with_times else "-"
    return row


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = result["sizes"]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """A page for docs/."""
    machine = "\n".join(f"- {key}: {value}" for key, value in result["machine"].items())
    return f"""# Structured outputs with trees

Made by benchmarks/structured_outputs.py: {result["tasks"]} tasks answered as JSON by a schema
(xgrammar), with drafts of the heads only and with chains from the text too, and the same prompts
without a grammar; at most {result["max_tokens"]} tokens each, greedy, batch 1,
{"compiled" if result["compiled"] else "eager"}, all sizes in one engine and one run. Others kept
{result["cores kept busy by other processes"]} cores busy; above {QUIET} no times are shown.

{machine}

{table(result)}

"Nodes per step" are those scheduled: drafts behind the last one that the grammar allows are not
verified. The speed-up is the median over tasks of tokens per second, relative to 0 nodes in the
same engine.
"""


if __name__ == "__main__":
    main()
