"""What tensor-parallel ranks send each other in one decoding step, with and without Medusa.

On paper: counted from the code, for shapes of well-known models. A test notes the collectives of a
real engine with two ranks and compares them with ``step_collectives``, another sends numbers
around rings of 2, 4 and 8 ranks and compares what was sent with ``bytes_sent``.

    python -m vllm_medusa.bench.communication docs/ray.md     # write the table into that page
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_medusa.tree import TokenTree, default_tree

ALL_REDUCE, ALL_GATHER, BROADCAST = "all_reduce", "all_gather", "broadcast"

# vLLM pads vocabularies to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE in
# vllm/model_executor/layers/vocab_parallel_embedding.py).
VOCAB_PADDING = 64

BEGIN = "<!-- communication: written by `make communication`, do not edit -->"
END = "<!-- /communication -->"
RANKS = (2, 4, 8)
REQUESTS = (1, 16)


class Target(NamedTuple):
    """The sizes of a target that say how much is sent."""

    name: str
    layers: int
    hidden: int
    vocab: int
    bytes_per_number: int


class Collective(NamedTuple):
    """One collective operation."""

    name: str
    """As vLLM's ``GroupCoordinator`` calls it."""
    size: int
    """Bytes that each rank puts in; for a broadcast, that the first rank does."""


TARGETS = (
    Target("8B, like Llama 3.1", layers=32, hidden=4096, vocab=128256, bytes_per_number=2),
    Target("70B, like Llama 3.1", layers=80, hidden=8192, vocab=128256, bytes_per_number=2),
)


def step_collectives(
    target: Target,
    ranks: int,
    requests: int,
    tree: TokenTree | None = None,
    sequential: bool = False,
) -> list[Collective]:
    """The collectives of a step in which every request decodes, in order.

    Args:
        target: a model of the Llama kind.
        ranks: tensor-parallel size.
        requests: how many requests are in the batch.
        tree: what is verified for each of them; None: no speculation.
        sequential: whether the heads are sequential ones.
    """
    rows = requests * (1 + (len(tree) if tree else 0))
    hidden = target.hidden * target.bytes_per_number
    vocab = -(-target.vocab // VOCAB_PADDING) * VOCAB_PADDING // ranks
    # The embedding; attention and MLP of every layer; the logits.
    found = [Collective(ALL_REDUCE, rows * hidden)] * (1 + 2 * target.layers)
    found.append(Collective(ALL_GATHER, rows * vocab * target.bytes_per_number))
    if tree:
        # The accepted paths (agreement.py): token and row, int64, for every step of the walk.
        found.append(Collective(BROADCAST, 2 * 8 * requests * (1 + len(tree))))
        found += _drafting(tree, requests, hidden, sequential)
    return found


def _drafting(
    tree: TokenTree, requests: int, hidden: int, sequential: bool
) -> Iterator[Collective]:
    """Ranks exchange their best tokens (heads/lm_head.py): value and token, float32."""
    if not sequential:
        yield Collective(ALL_GATHER, 2 * 4 * requests * tree.depth * max(tree.num_ranks))
        return
    for depth, num_ranks in enumerate(tree.num_ranks, start=1):
        parents = len({path[:-1] for path in tree.paths if len(path) == depth})
        # Embeddings of the tokens on the paths to the parents.
        yield Collective(ALL_REDUCE, requests * parents * depth * hidden)
        yield Collective(ALL_GATHER, 2 * 4 * requests * parents * num_ranks)


def bytes_sent(collective: Collective, ranks: int) -> float:
    """What each rank sends for a collective, by the ring algorithms.

    All-reduce: every rank sends each of n parts but one twice (reduce-scatter, then all-gather).
    All-gather: every rank sends the parts of all ranks but its successor's. Broadcast: every rank
    but the last hands all of it on.
    """
    factor = {ALL_REDUCE: 2 * (ranks - 1) / ranks, ALL_GATHER: ranks - 1.0, BROADCAST: 1.0}
    return factor[collective.name] * collective.size


def table() -> str:
    """The table of the page."""
    sent = " | ".join(f"MB, {ranks} ranks" for ranks in RANKS)
    lines = [
        f"| target | requests | speculation | collectives | {sent} | times plain |",
        "|---" * (5 + len(RANKS)) + "|",
    ]
    for target in TARGETS:
        for requests in REQUESTS:
            lines += _rows(target, requests)
    return "\n".join(lines)


def _rows(target: Target, requests: int) -> Iterator[str]:
    kinds: list[tuple[str, TokenTree | None, bool]] = [("none", None, False)]
    for nodes in (15, 63):
        tree = default_tree(4, nodes)
        kinds += [(f"{nodes} nodes", tree, False), (f"{nodes} nodes, sequential", tree, True)]
    plain = 0.0
    for name, kind, sequential in kinds:
        megabytes = []
        for ranks in RANKS:
            found = step_collectives(target, ranks, requests, kind, sequential)
            megabytes.append(sum(bytes_sent(collective, ranks) for collective in found) / 1e6)
        plain = plain or megabytes[0]
        cells = [target.name, str(requests), name, str(len(found))]
        cells += [f"{number:.2f}" for number in megabytes] + [f"{megabytes[0] / plain:.1f}"]
        yield f"| {' | '.join(cells)} |"


def with_table(page: str) -> str:
    """A page with the table between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="1 if the page is not up to date")
    args = parser.parse_args(argv)
    page = args.page.read_text()
    updated = with_table(page)
    if args.check:
        return int(updated != page)
    args.page.write_text(updated)
    return 0


if __name__ == "__main__":
    sys.exit(main())
