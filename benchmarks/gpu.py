"""What trees cost and give on a GPU, with models made on the spot: nothing is downloaded.

Two targets with random weights: one of a Llama 1B's shape and one with the layers of a Llama 7B,
but fewer of them. An oracle in the heads' place drafts what the target will say, so that every step
accepts a whole path. Per context length: the time of a decoding step without speculation, with a
chain and with a tree, each with and without CUDA graphs; then the kernels by themselves: attention
over trees beside FlashAttention over as many causal rows, the walk, and compaction.

    python benchmarks/gpu.py --output gpu-results   # under 8 minutes on one GPU
    python benchmarks/gpu.py --toy                  # the same code, tiny, in Triton's interpreter

Every engine runs in a process of its own; finished parts are kept in OUTPUT/gpu.json, and a run
that was stopped goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

# Llama 3.2 1B, and layers as in Llama 2 7B.
MODELS = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "7B, 4 layers": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 4,
                     "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000},
}  # fmt: skip
TOY = {
    "toy": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
}  # fmt: skip
CONTEXTS = (512, 4096, 16384)
DEPTH = 4
NODES = 63
TOKENS = 128  # per measured run
REPETITIONS = 5
"""Runs per context; the median counts."""
# At toy size.
TOY_CONTEXTS = (24,)
TOY_NODES = 15
TOY_TOKENS = 12


def parts(toy: bool) -> list[dict[str, Any]]:
    """What is measured, one process each."""
    models = TOY if toy else MODELS
    graphs = (False,) if toy else (True, False)
    engines = [
        {"kind": "engine", "model": model, "variant": variant, "graphs": graph}
        for model in models
        for graph in graphs
        for variant in ("plain", "chain", "tree")
    ]
    return engines + [{"kind": "kernels", "model": model} for model in models]


def name_of(part: dict[str, Any]) -> str:
    """A part's name in the results."""
    if part["kind"] == "kernels":
        return f"kernels, {part['model']}"
    return f"{part['model']}, {part['variant']}, {'graphs' if part['graphs'] else 'eager'}"


# -- one part, in its own process ------------------------------------------------------------------


def make_target(folder: Path, shape: dict[str, int], longest: int, dtype: str) -> Path:
    """A Llama of a given shape; vLLM itself fills it with random weights (load_format dummy)."""
    import transformers

    transformers.LlamaConfig(
        **shape,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        torch_dtype=dtype,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def make_heads(folder: Path, hidden_size: int) -> Path:
    """Heads of one block each that share the target's LM head; the oracle overrules them."""
    import torch
    from safetensors.torch import save_file

    weight = torch.zeros(hidden_size, hidden_size)
    tensors = {f"{head}.0.linear.weight": weight.clone() for head in range(DEPTH)}
    tensors |= {f"{head}.0.linear.bias": torch.zeros(hidden_size) for head in range(DEPTH)}
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"version": "2", "medusa_num_heads": DEPTH, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tree_of(variant: str, nodes: int) -> list[list[int]]:
    """A chain of ``DEPTH``, or a tree of so many nodes that holds it."""
    from vllm_medusa.tree import default_tree

    if variant == "chain":
        return [[0] * depth for depth in range(1, DEPTH + 1)]
    return [list(path) for path in default_tree(DEPTH, nodes).paths]


class Oracle:
    """Drafts the target's own words, known from a run without speculation, on the device.

    Right tokens lie along the tree's first chain, wrong ones everywhere else.
    """

    def __init__(self, llm: Any) -> None:
        from vllm_medusa.calibration.live import model_runner
        from vllm_medusa.runner.speculator import MedusaSpeculator
        from vllm_medusa.runner.v2 import TreeModelRunner

        self.runner = model_runner(llm)
        assert isinstance(self.runner, TreeModelRunner)
        self.text: Any = None
        original = MedusaSpeculator.propose

        def propose(speculator: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = original(speculator, input_batch, *args, **kwargs)
            return drafts if self.text is None else self.draft(input_batch, drafts)

        MedusaSpeculator.propose = propose

    def tell(self, text: list[int], nodes: list[tuple[int, ...]]) -> None:
        """What the target will say next, and the tree."""
        import torch

        device = self.runner.device
        # Behind the end the last token is as good as any: drafts there are never needed.
        self.text = torch.tensor(text + text[-1:] * (DEPTH + 1), device=device)
        self.depths = torch.tensor([len(path) for path in nodes], device=device)
        self.is_right = torch.tensor([not any(path) for path in nodes], device=device)

    def draft(self, input_batch: Any, drafts: Any) -> Any:
        import torch

        states, index = self.runner.req_states, input_batch.idx_mapping
        said = states.total_len.gpu[index] - states.prompt_len.gpu[index]
        place = said.long()[:, None] + self.depths - 1
        right = self.text[place.clamp(0, len(self.text) - 1)]
        wrong = (right + 1) % self.runner.vocab_size
        return torch.where(self.is_right, right, wrong).to(drafts.dtype)


def measure_engine(part: dict[str, Any], toy: bool) -> dict[str, Any]:
    """Milliseconds per step and tokens per step, by context."""
    import torch
    from vllm import LLM, SamplingParams

    shape = (TOY if toy else MODELS)[part["model"]]
    contexts = TOY_CONTEXTS if toy else CONTEXTS
    tokens = TOY_TOKENS if toy else TOKENS
    dtype = "float32" if toy else "bfloat16"
    longest = max(contexts) + tokens + NODES + 2
    nodes = TOY_NODES if toy else NODES
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options: dict[str, Any] = {
            "model": str(make_target(folder / "target", shape, longest, dtype)),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_model_len": longest,
            "max_num_seqs": 4,
            "max_num_batched_tokens": max(longest, 128),
            "enable_prefix_caching": True,  # the context is read once
            "enforce_eager": not part["graphs"],
            "seed": 0,
        }
        if part["graphs"]:
            # No torch.compile: its start-up would take most of the time, and graphs are the point.
            options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        if toy:
            options["num_gpu_blocks_override"] = 64
        tree = []
        if part["variant"] != "plain":
            tree = [tuple(path) for path in tree_of(part["variant"], nodes)]
            options["speculative_config"] = {
                "method": "medusa",
                "model": str(make_heads(folder / "heads", shape["hidden_size"])),
                "tree": [list(path) for path in tree],
            }
            if toy:  # else vLLM's CPU attention, which is no GPU's
                options["attention_config"] = {"backend": "TRITON_ATTN"}
        llm = LLM(**options)
        oracle = Oracle(llm) if tree else None
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        found: dict[str, Any] = {}
        for context in contexts:
            torch.manual_seed(context)
            prompt = torch.randint(3, shape["vocab_size"], (context,)).tolist()

            def run(prompt: list[int] = prompt) -> tuple[float, int, list[int]]:
                """Milliseconds of decoding, steps, and the text."""
                engine = llm.llm_engine
                engine.add_request(f"{time.monotonic_ns()}", {"prompt_token_ids": prompt}, greedy)
                text: list[int] = []
                while not text:  # the prompt, which is cached but for its end
                    for output in engine.step():
                        text = list(output.outputs[0].token_ids)
                first, steps, start = len(text), 0, time.perf_counter()
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        steps += len(output.outputs[0].token_ids) > len(text)
                        text = list(output.outputs[0].token_ids)
                elapsed = (time.perf_counter() - start) * 1000
                assert len(text) > first
                return elapsed, steps, text

            if oracle:
                oracle.text = None
            _, _, text = run()  # reads the prompt into the cache, and says what is to come
            if oracle:
                oracle.tell(text, tree)
            runs = [run() for _ in range(1 if toy else REPETITIONS)]
            for _, _, said in runs:
                if said != text:
                    raise RuntimeError(f"{name_of(part)}: the text changed between two runs")
            rates = [(len(said) - 1) / max(steps, 1) for _, steps, said in runs]
            found[str(context)] = {
                "ms_per_step": statistics.median(ms / max(steps, 1) for ms, steps, _ in runs),
                "tokens_per_step": statistics.median(rates),
                "ms_per_token": statistics.median(ms / (len(said) - 1) for ms, _, said in runs),
            }
        return found


def measure_kernels(part: dict[str, Any], toy: bool) -> dict[str, Any]:
    """Microseconds per call of each kernel, by context."""
    import torch

    from vllm_medusa.acceptance_kernel import walk_drawn_tokens
    from vllm_medusa.attention.triton_tree import TreeBatch, tree_attention
    from vllm_medusa.bank import TreeBank
    from vllm_medusa.compaction_kernel import SlotMover
    from vllm_medusa.tree import default_tree

    shape = (TOY if toy else MODELS)[part["model"]]
    device = torch.device("cpu" if toy else "cuda")
    dtype = torch.float32 if toy else torch.bfloat16
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_size = shape["hidden_size"] // heads
    nodes = TOY_NODES if toy else NODES
    rows, block_size = nodes + 1, 16
    bank = TreeBank([default_tree(DEPTH, nodes)], device)

    def times(context: int) -> dict[str, float]:
        blocks = (context + rows) // block_size + 1
        caches = [
            torch.randn(blocks, kv_heads, block_size, 2 * head_size, device=device).to(dtype)
            for _ in range(shape["num_hidden_layers"])
        ]
        query = torch.randn(rows, heads, head_size, device=device).to(dtype)
        batch = TreeBatch(
            query_start_loc=torch.tensor([0, rows], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([context + rows], dtype=torch.int32, device=device),
            block_table=torch.arange(blocks, dtype=torch.int32, device=device)[None],
            tree_index=torch.zeros(1, dtype=torch.int32, device=device),
            ancestors=bank.ancestors,
            max_rows=rows,
            max_seq_len=context + rows,
        )
        output = torch.empty_like(query)
        drawn = torch.randint(0, 2, (rows,), device=device)
        walk = (
            drawn, drawn, batch.query_start_loc, torch.zeros(1, dtype=torch.int64, device=device),
            bank.parents, DEPTH + 1,
        )  # fmt: skip
        paths, mover = walk_drawn_tokens(*walk), SlotMover(caches)
        slots = torch.arange(context, context + rows, device=device)
        first = torch.zeros(1, dtype=torch.int64, device=device)
        calls = {
            "tree attention": lambda: tree_attention(
                query, caches[0], output, batch, head_size**-0.5
            ),
            "walk": lambda: walk_drawn_tokens(*walk),
            "compaction": lambda: mover.move(paths, slots, first),
        }
        if not toy:
            calls["FlashAttention, causal"] = flash_attention(query, caches[0], batch)
        repetitions = 1 if toy else 50
        return {name: microseconds(call, device, repetitions) for name, call in calls.items()}

    return {str(context): times(context) for context in (TOY_CONTEXTS if toy else CONTEXTS)}


def flash_attention(query: Any, kv_cache: Any, batch: Any) -> Any:
    """vLLM's FlashAttention over as many rows, causal: it reads the same keys."""
    import torch
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    head_size = query.shape[2]
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    output = torch.empty_like(query)

    def call() -> None:
        flash_attn_varlen_func(
            q=query, k=keys, v=values, out=output,
            cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_rows,
            seqused_k=batch.seq_lens, max_seqlen_k=batch.max_seq_len,
            softmax_scale=head_size**-0.5, causal=True, block_table=batch.block_table,
            fa_version=get_flash_attn_version(head_size=head_size),
        )  # fmt: skip

    return call


def microseconds(call: Any, device: Any, repetitions: int) -> float:
    """The median time of a call; on a GPU by its own clock."""
    import torch

    call()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
        else:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


# -- all parts -------------------------------------------------------------------------------------


def page(results: dict[str, Any], device: str, toy: bool) -> str:
    """The results as Markdown tables."""
    from vllm_medusa.bench.report import markdown_table

    steps, kernels = [], []
    for name, by_context in results.items():
        for context, values in by_context.items():
            if "ms_per_step" in values:
                steps.append(
                    [name, context, f"{values['ms_per_step']:.2f}",
                     f"{values['tokens_per_step']:.2f}", f"{values['ms_per_token']:.2f}"]
                )  # fmt: skip
            else:
                kernels += [
                    [name, context, kernel, f"{time:.0f}"] for kernel, time in values.items()
                ]
    head = ["", "context", "ms/step", "tokens/step", "ms/token"]
    lines = [
        f"# Steps and kernels on {device}",
        "",
        f"Random weights, batch 1, greedy, medians of {1 if toy else REPETITIONS} runs of "
        f"{TOY_TOKENS if toy else TOKENS} tokens; an oracle drafts, so that whole paths are "
        f"accepted (trees of {TOY_NODES if toy else NODES} nodes, depth {DEPTH}).",
        "",
        *markdown_table(head, steps),
        "",
        *markdown_table(["", "context", "kernel", "µs"], kernels),
    ]
    return "\n".join(lines) + "\n"


def run_part(part: dict[str, Any], toy: bool, file: Path) -> dict[str, Any]:
    """Measure one part in a process of its own."""
    words = [sys.executable, __file__, "--part", json.dumps(part), "--output", str(file)]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    if toy:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        words.append("--toy")
    subprocess.run(words, check=True, env=environment)
    return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-results"), help="a folder")
    parser.add_argument("--toy", action="store_true", help="tiny, in Triton's interpreter")
    parser.add_argument("--part", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        if args.toy:
            from tests import triton_interpreter

            triton_interpreter.enable()
        measure = measure_kernels if args.part["kind"] == "kernels" else measure_engine
        args.output.write_text(json.dumps(measure(args.part, args.toy)))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "gpu.json"
    results = json.loads(file.read_text()) if file.is_file() else {}
    todo = parts(args.toy)
    for number, part in enumerate(todo, start=1):
        name = name_of(part)
        if name in results:
            continue
        print(f"{number} of {len(todo)}: {name}", flush=True)
        results[name] = run_part(part, args.toy, args.output / "part.json")
        file.write_text(json.dumps(results, indent=1) + "\n")
    (args.output / "part.json").unlink(missing_ok=True)
    text = page(results, device_name(args.toy), args.toy)
    (args.output / "gpu.md").write_text(text, encoding="utf-8")
    print(text)


def device_name(toy: bool) -> str:
    """What it was measured on."""
    if toy:
        return "no GPU: Triton's interpreter, toy sizes"
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
