"""How well heads foretell held-out answers: rank paths, accuracies by rank, tokens per step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_medusa.calibration.growth import grow_tree, rank_counts
from vllm_medusa.calibration.ranks_file import MISS, NUM_RANKS, RankPaths
from vllm_medusa.calibration.replay import tokens_per_step
from vllm_medusa.training.answers import Answer
from vllm_medusa.training.batches import make_batch
from vllm_medusa.training.model import TrainableHeads

ANSWERS_PER_BATCH = 16


@torch.inference_mode()
def rank_paths(heads: TrainableHeads, items: Sequence[tuple[torch.Tensor, Answer]]) -> RankPaths:
    """For each answer, uint8 [tokens - 1, K]: ranks of its tokens in the heads' lists.

    See ``calibration.ranks_file`` for what the numbers mean.
    """
    device = heads.lm_head.device
    found: RankPaths = []
    for start in range(0, len(items), ANSWERS_PER_BATCH):
        batch = make_batch(items[start : start + ANSWERS_PER_BATCH], heads.spec.num_heads)
        labels = batch.labels.to(device)
        rows = torch.where(labels >= 0, heads.row_of[labels.clamp(min=0)], -1)
        columns = []
        for head, logits in enumerate(
            heads.logits(batch.states.to(device), batch.paths.to(device))
        ):
            best = logits.topk(min(NUM_RANKS, logits.shape[-1]), dim=-1).indices
            hits = best == rows[:, head, None]
            columns.append(torch.where(hits.any(dim=-1), hits.int().argmax(dim=-1), MISS))
        ranks = torch.stack(columns, dim=1).to(torch.uint8).cpu()
        # Behind an answer's last token there is nothing to guess.
        found += [answer[:-1].numpy() for answer in ranks.split(batch.lengths.tolist())]
    return found


def accuracy_by_rank(paths: Sequence[NDArray[np.uint8]]) -> list[list[float]]:
    """[K][10], share of positions at which the true token is among head k's first r + 1, given the
    true tokens on the path to it."""
    table = []
    for head in range(paths[0].shape[1]):
        # The last positions of an answer have no token for deeper heads to guess.
        ranks = np.concatenate([path[: len(path) - head, head] for path in paths])
        table.append([float((ranks <= rank).mean()) for rank in range(NUM_RANKS)])
    return table


def expected_tokens(
    paths: Sequence[NDArray[np.uint8]], sizes: Sequence[int], num_ranks: int
) -> dict[int, float]:
    """Tokens per step on these answers by number of nodes, each the best tree of its size for them.

    Args:
        paths: rank paths.
        sizes: numbers of nodes.
        num_ranks: tokens in the draft vocabulary, or more.
    """
    tree = grow_tree(rank_counts(paths), paths[0].shape[1], max(sizes), min(NUM_RANKS, num_ranks))
    rates = tokens_per_step(paths, tree)
    return {size: rates[min(size, len(tree))] for size in sizes}
