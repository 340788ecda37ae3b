"""What the heads' tokens per step would give on GPUs. A projection, not a measurement.

The roofline model (Williams et al., CACM 2009): a step takes the larger of the time to read its
bytes from memory and the time to compute its operations, at the peak rates of the data sheets. What
an engine adds to that (kernel launches, sampling, scheduling) is left out, so real gains differ
where a step is very short.

    python -m vllm_medusa.bench.projection SIZES_JSON --heads HEADS --output projection.md

SIZES_JSON is what ``vllm-medusa bench --sizes`` writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_medusa.bench.report import markdown_table
from vllm_medusa.heads.checkpoint import inspect_heads

BYTES = 2  # of a bfloat16 number


@dataclass(frozen=True)
class Gpu:
    """Peak rates: bytes per second from memory, operations per second in dense bfloat16."""

    name: str
    bandwidth: float
    operations: float


@dataclass(frozen=True)
class Model:
    """A target in bfloat16, as far as its steps' cost depends on it.

    Attributes:
        name: as it stands in the table.
        parameters: all of them are read in each step.
        layers: number of layers.
        kv_width: key heads times the size of a head.
        hidden: size of the hidden state.
        vocabulary: rows of the LM head.
    """

    name: str
    parameters: float
    layers: int
    kv_width: int
    hidden: int
    vocabulary: int


GPUS = (
    Gpu("A100 80 GB", 2.04e12, 312e12),
    Gpu("H100 SXM", 3.35e12, 989e12),
)
MODELS = (
    Model("SmolLM2-135M", 134.5e6, layers=30, kv_width=192, hidden=576, vocabulary=49152),
    Model("7B (Llama 2)", 6.74e9, layers=32, kv_width=4096, hidden=4096, vocabulary=32000),
)
BATCH_SIZES = (1, 8, 32)


def roofline_seconds(gpu: Gpu, num_bytes: float, operations: float) -> float:
    """The larger of the time to read and the time to compute."""
    return max(num_bytes / gpu.bandwidth, operations / gpu.operations)


def step_seconds(gpu: Gpu, model: Model, rows: int, batch_size: int, context: int) -> float:
    """Seconds of a forward pass.

    Args:
        gpu: where it runs.
        model: the target.
        rows: tokens of each request that are verified, the root among them.
        batch_size: requests.
        context: tokens of each request in the KV cache.
    """
    cached = 2 * model.layers * model.kv_width * context * batch_size
    # Two operations for a weight and row; attention: queries times keys, and weights times values,
    # for as many query heads as the hidden size holds.
    products = 2 * model.parameters * rows * batch_size
    attention = 4 * model.layers * model.hidden * context * rows * batch_size
    return roofline_seconds(gpu, BYTES * (model.parameters + cached), products + attention)


@dataclass(frozen=True)
class Heads:
    """How drafting works.

    Attributes:
        number: of heads.
        vocabulary: rows of the LM head that are used; None is all of the target's.
        sequential: head k reads the embeddings of the k tokens before its guess, too, and each head
            reads the LM head anew; others share one product.
        layers: residual blocks of each head.
    """

    number: int = 4
    vocabulary: int | None = None
    sequential: bool = False
    layers: int = 1

    @classmethod
    def of(cls, heads: str) -> Heads:
        """Stored heads, a folder or a hub id.

        Raises:
            HeadsError: they are not there, or cannot be read.
        """
        info = inspect_heads(heads)
        return cls(info.num_heads, info.draft_vocab_size, info.is_sequential, info.num_layers)

    def block_parameters(self, hidden: int) -> int:
        """Numbers in the residual blocks: hidden^2 in each, and in the first one of a sequential
        head as many for every token on its path."""
        blocks = self.number * self.layers
        if self.sequential:
            blocks += sum(range(1, self.number + 1))
        return blocks * hidden**2


def drafting_seconds(gpu: Gpu, model: Model, heads: Heads, batch_size: int) -> float:
    """Seconds of drafting: the residual blocks of the heads, then the rows of the LM head.

    Args:
        gpu: where it runs.
        model: the target.
        heads: the heads.
        batch_size: requests.
    """
    blocks = heads.block_parameters(model.hidden)
    lm_head = (heads.vocabulary or model.vocabulary) * model.hidden
    operations = 2 * batch_size * (blocks + heads.number * lm_head)
    passes = heads.number if heads.sequential else 1
    return roofline_seconds(gpu, BYTES * (blocks + passes * lm_head), operations)


def relative_cost(
    gpu: Gpu, model: Model, heads: Heads, nodes: int, batch_size: int, context: int
) -> float:
    """A step with a tree and drafting, relative to one without speculation; 1 without nodes."""
    base = step_seconds(gpu, model, 1, batch_size, context)
    if nodes == 0:
        return 1.0
    tree = step_seconds(gpu, model, 1 + nodes, batch_size, context)
    return (tree + drafting_seconds(gpu, model, heads, batch_size)) / base


def gain(tokens_per_step: float, cost: float) -> float:
    """The speed-up: tokens per step over the relative cost of a step."""
    return tokens_per_step / cost


def projection(
    tokens: Mapping[str, Mapping[int, float]], heads: Heads, context: int
) -> list[tuple[str, ...]]:
    """Lines of the table: for each GPU, model, batch size and set, the gain by number of nodes."""
    lines = []
    for gpu in GPUS:
        for model in MODELS:
            for batch_size in BATCH_SIZES:
                for kind, by_nodes in tokens.items():
                    gains = [
                        gain(
                            rate,
                            relative_cost(gpu, model, heads, nodes, batch_size, context),
                        )
                        for nodes, rate in by_nodes.items()
                    ]
                    cells = (f"{value:.2f}" for value in gains)
                    lines.append((gpu.name, model.name, str(batch_size), kind, *cells))
    return lines


def page(tokens: Mapping[str, Mapping[int, float]], heads: Heads, context: int) -> str:
    """The projection as a page."""
    nodes = [str(number) for number in next(iter(tokens.values()))]
    counted = [(kind, *(f"{rate:.2f}" for rate in by_nodes.values()))
               for kind, by_nodes in tokens.items()]  # fmt: skip
    rates = ", ".join(
        f"{gpu.name} {gpu.bandwidth / 1e12:.2f} TB/s and {gpu.operations / 1e12:.0f} TFLOP/s"
        for gpu in GPUS
    )
    lines = [
        "# Projection: what the heads' tokens per step give on GPUs",
        "",
        "**Projected, not measured.** Tokens per step are measured (first table; they depend on "
        "heads, tree and text, not on the machine). The cost of a step is the roofline's: the "
        "larger of bytes / bandwidth and operations / peak, for the weights in bfloat16, the KV "
        f"cache of {context} tokens per request, and drafting ({heads.number} "
        f"{'sequential' if heads.sequential else 'parallel'} heads of {heads.layers} blocks, LM "
        f"head of {heads.vocabulary or 'all'} tokens). Peaks: {rates} (dense bfloat16). Kernel "
        "launches, sampling and scheduling are left out; they weigh most on the small model. The "
        "7B lines assume heads as accurate there as here.",
        "",
        "## Tokens per step, measured",
        "",
        *markdown_table(["nodes", *nodes], counted),
        "",
        "## Speed-up over no speculation, projected",
        "",
        *markdown_table(
            ["GPU", "model", "batch", "set", *(f"{number} nodes" for number in nodes)],
            projection(tokens, heads, context),
        ),
    ]
    return "\n".join(lines) + "\n"


def read_sizes(path: Path) -> dict[str, dict[int, float]]:
    """Set -> nodes -> tokens per step, from the file that `vllm-medusa bench --sizes` writes."""
    stored = json.loads(path.read_text())["tokens_per_step"]
    return {kind: {int(n): rate for n, rate in by_n.items()} for kind, by_n in stored.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sizes", type=Path, metavar="SIZES_JSON")
    parser.add_argument("--output", type=Path, help="a Markdown file (default: print it)")
    parser.add_argument("--context", type=int, default=300, help="tokens (default: 300)")
    parser.add_argument(
        "--heads", metavar="HEADS", required=True, help="those that were counted: folder or hub id"
    )
    args = parser.parse_args(arguments)
    heads = Heads.of(args.heads)
    text = page(read_sizes(args.sizes), heads, args.context)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
