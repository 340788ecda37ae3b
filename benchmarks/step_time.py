"""Where the time of a step goes, and what a step over T tokens costs.

One engine, in this process, compiled as it is served. Every prompt is answered greedily with trees
of 0 (no speculation), 1, 2, 3, ... nodes in turn, so that all sizes are measured side by side; the
time of every decoding step is split into its parts. From that come: tokens per step by size (a
property of heads and tree), the cost of a step by size (a property of the machine), the bound on
the speed-up that they give together, and what was reached of it.

    make steps      # or: python benchmarks/step_time.py MODEL HEADS --output FOLDER
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from in_process import start

from vllm_medusa.calibration.live import model_runner, set_tree_size, step_clock
from vllm_medusa.demo.prompts import demo_prompts
from vllm_medusa.load import LoadMeter
from vllm_medusa.machine import describe_machine

# Parts of a step that run inside others; what is left of the whole is the engine's.
PARTS = ("forward", "LM head", "acceptance", "compaction", "drafting")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("heads")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3, 4, 5, 7, 11, 15, 31, 63])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tree", help="as the option of that name; default: the heads' tree")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--output", type=Path, help="folder for steps.json and steps.md")
    args = parser.parse_args()

    own_tree = {"tree": args.tree} if args.tree else {}
    llm = start(args.model, args.heads, max(args.nodes), args.eager, lookup=False, **own_tree)
    from vllm import SamplingParams

    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = model_runner(llm)
    clock = step_clock(llm)
    clock.time(runner, "_sample", "acceptance")
    clock.time(runner, "_compact", "compaction")

    sampling = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    tokenizer = llm.get_tokenizer()
    sizes = [0, *args.nodes]
    steps: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    tokens = dict.fromkeys(sizes, 0)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    meter = LoadMeter()
    started = time.process_time()
    for number, prompt in enumerate(demo_prompts()[: args.prompts]):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for turn in range(len(sizes)):
            size = sizes[(number + turn) % len(sizes)]
            set_tree_size(core.scheduler, size)
            engine.add_request(f"{number}-{size}", {"prompt_token_ids": ids}, sampling)
            before, answer = 0, 0.0
            while engine.has_unfinished_requests():
                begun = time.perf_counter()
                outputs = engine.step()
                whole = time.perf_counter() - begun
                parts = clock.take()
                # Compaction is called within acceptance.
                parts["acceptance"] = parts.get("acceptance", 0.0) - parts.get("compaction", 0.0)
                now = len(outputs[0].outputs[0].token_ids) if outputs else before
                # The first token is the prefill's, and the step after it starts without drafts in
                # no engine; both are left out of the decoding steps.
                if before:
                    steps[size].append(parts | {"step": whole})
                    tokens[size] += now - before
                    answer += whole
                before = now
            seconds[size].append(answer)
        print(f"{prompt.name}: done", flush=True)
    others = meter.others(time.process_time() - started)
    result = summarise(sizes, steps, tokens, seconds) | {
        "machine": describe_machine(),
        "cores kept busy by other processes": round(others, 3),
        "prompts": args.prompts,
        "max_tokens": args.max_tokens,
        "compiled": not args.eager,
    }
    print(table(result))
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "steps.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.output / "steps.md").write_text(page(result))


def summarise(
    sizes: list[int],
    steps: dict[int, list[dict[str, float]]],
    tokens: dict[int, int],
    seconds: dict[int, list[float]],
) -> dict[str, Any]:
    """Medians over steps by size.

    The bound is tokens per step / (cost of the target's work + drafting), where 1 is the cost of a
    step without speculation. The target's work is the forward pass, the LM head and drawing tokens.
    """

    def target(step: dict[str, float]) -> float:
        return step["forward"] + step["LM head"] + step["acceptance"]

    base = statistics.median(map(target, steps[0]))
    rows = []
    for size in sizes:
        parts = {
            part: statistics.median(step.get(part, 0.0) for step in steps[size]) for part in PARTS
        }
        whole = statistics.median(step["step"] for step in steps[size])
        cost = statistics.median(map(target, steps[size]))
        per_step = tokens[size] / len(steps[size])
        bound = per_step * base / (cost + parts["drafting"])
        reached = statistics.median(
            alone / ours for alone, ours in zip(seconds[0], seconds[size], strict=True)
        )
        rows.append(
            {
                "nodes": size,
                "tokens per step": round(per_step, 3),
                "cost of the target": round(cost / base, 3),
                **{f"{part} ms": round(1e3 * parts[part], 3) for part in PARTS},
                "engine ms": round(1e3 * (whole - sum(parts.values())), 3),
                "step ms": round(1e3 * whole, 3),
                "bound": round(bound, 3),
                "speed-up": round(reached, 3),
                "of the bound": round(reached / bound, 3),
            }
        )
    return {"sizes": rows}


def table(result: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rows = result["sizes"]
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """A page for docs/."""
    machine = "\n".join(f"- {key}: {value}" for key, value in result["machine"].items())
    return f"""# What a step costs, and where its time goes

Made by `make steps` (benchmarks/step_time.py): {result["prompts"]} prompts, {result["max_tokens"]}
tokens each, greedy, batch 1, all sizes in one engine and one run. Times are medians over steps.
Others kept {result["cores kept busy by other processes"]} cores busy.

{machine}

{table(result)}

"Cost of the target" is forward, LM head and acceptance, relative to a step without speculation.
The bound is tokens per step / (that cost + drafting); the speed-up is the median over prompts of
the time of all decoding steps, relative to 0 nodes in the same engine. Above 1 "of the bound"
means that the engine's own time, which the bound leaves out, is shared by more tokens.
"""


if __name__ == "__main__":
    main()
