"""Tokens per step by size of the tree: a property of heads, tree and text, not of the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_medusa.bench.engine import Engine
from vllm_medusa.bench.generation import tokens_per_step
from vllm_medusa.bench.progress import Progress
from vllm_medusa.bench.report import markdown_table
from vllm_medusa.demo.prompts import Prompt

# Tokens per step depend neither on speed nor on the batch: no need to compile, nor for batch 1.
COUNTING_OPTIONS: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 16}

Counts = dict[str, dict[int, float]]
"""Set -> nodes -> tokens per step."""


def count_tree_sizes(
    engine: Engine,
    prompts: Mapping[str, Sequence[Prompt]],
    sizes: Sequence[int],
    max_tokens: int,
    progress: Progress,
) -> Counts:
    """Tokens per step of greedy answers, for the first nodes of the engine's tree.

    Args:
        engine: started, with a tree of at least so many nodes.
        prompts: by set.
        sizes: numbers of nodes.
        max_tokens: where answers are cut.
        progress: told what is counted.
    """
    counts: Counts = {kind: {} for kind in prompts}
    for nodes in sizes:
        for kind, members in prompts.items():
            progress(f"counting tokens per step with {nodes} nodes: {kind}")
            answers, *_ = engine.generate(members, max_tokens, nodes=nodes)
            counts[kind][nodes] = tokens_per_step(answers)
    return counts


def size_headings(counts: Counts) -> tuple[str, ...]:
    """The headings over `size_rows`."""
    return ("nodes", *(str(nodes) for nodes in next(iter(counts.values()))))


def size_rows(counts: Counts) -> list[tuple[str, ...]]:
    """A line for every set."""
    return [
        (kind, *(f"{value:.2f}" for value in by_nodes.values()))
        for kind, by_nodes in counts.items()
    ]


def sizes_markdown(counts: Counts, note: str) -> str:
    """A section of a page.

    Args:
        counts: from `count_tree_sizes`.
        note: of how many prompts and tokens they were counted.
    """
    lines = ["## Tokens per step by size of the tree", ""]
    lines += markdown_table(size_headings(counts), size_rows(counts))
    lines += [
        "",
        f"{note} A property of heads, tree and text: the machine decides which size pays.",
    ]
    return "\n".join(lines) + "\n"
