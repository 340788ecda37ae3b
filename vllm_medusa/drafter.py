"""Drafting: hidden states to the tokens of a tree.

Plain heads guess without knowing each other's guesses: one top-k for all of them.
Sequential heads read the path to their guess: the tree is filled depth by depth, one product per
depth over the nodes that have children, for the whole batch.

Tokens are the best ones of the heads, or drawn from them (``sampled_drafts.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group

from vllm_medusa.heads.module import MedusaHeads
from vllm_medusa.sampled_drafts import (
    NUM_CANDIDATES,
    DraftProbs,
    DraftSampling,
    draft_probs,
    draw_distinct,
)
from vllm_medusa.tree import TokenTree


@dataclass(frozen=True)
class Level:
    """The nodes of one depth, as places in a request's rows (root first).

    Attributes:
        paths: int64 [P, depth], for each parent of the level the rows from the root to it.
        nodes: int64 [N], rows of the nodes.
        ranks: int64 [N], which of a head's best tokens each node takes.
        places: int64 [N], which of the P x num_ranks best tokens behind all parents.
        num_ranks: how many best tokens behind each parent are looked at.
    """

    paths: torch.Tensor
    nodes: torch.Tensor
    ranks: torch.Tensor
    places: torch.Tensor
    num_ranks: int


def levels_of(tree: TokenTree, device: torch.device) -> list[Level]:
    """The levels of a tree, depth 1 first."""
    row_of = {(): 0} | {path: row for row, path in enumerate(tree.paths, start=1)}
    levels = []
    for depth, num_ranks in enumerate(tree.num_ranks, start=1):
        nodes = [path for path in tree.paths if len(path) == depth]
        parents = sorted({path[:-1] for path in nodes})
        places = [parents.index(path[:-1]) * num_ranks + path[-1] for path in nodes]
        rows = [[row_of[parent[:end]] for end in range(depth)] for parent in parents]
        levels.append(
            Level(
                torch.tensor(rows, device=device),
                torch.tensor([row_of[path] for path in nodes], device=device),
                torch.tensor([path[-1] for path in nodes], device=device),
                torch.tensor(places, device=device),
                num_ranks,
            )
        )
    return levels


class MedusaDrafter:
    """Fills the nodes of a token tree from the heads."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.config = vllm_config.speculative_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.tree: TokenTree = self.config.token_tree
        self.drawn_tree = self.tree.with_siblings_numbered()
        # Levels of the first n nodes, by n (a batch-size schedule asks for several sizes) and by
        # whether they are of the tree of drawn drafts.
        self.levels: dict[tuple[int, bool], list[Level]] = {}
        schedule = self.config.num_speculative_tokens_per_batch_size or []
        for num_nodes in {len(self.tree), *(nodes for _, _, nodes in schedule)} - {0}:
            for is_drawn in {False, self.config.draft_sample_method != "greedy"}:
                self._levels(num_nodes, is_drawn)

    def load_model(self, target: nn.Module) -> None:
        """Load the heads; called by the runner once the target is loaded."""
        # Heads deeper than the tree would be computed for nothing.
        self.heads = MedusaHeads(
            self.config.model,
            self.config.revision,
            target,
            self.model_config,
            num_heads=self.tree.depth,
        ).to(self.device)

    def _levels(self, num_nodes: int, is_drawn: bool = False) -> list[Level]:
        key = num_nodes, is_drawn
        if key not in self.levels:
            tree = self.drawn_tree if is_drawn else self.tree
            self.levels[key] = levels_of(tree.prefix(num_nodes), self.device)
        return self.levels[key]

    def propose(
        self, hidden_states: torch.Tensor, roots: torch.Tensor, num_nodes: int
    ) -> torch.Tensor:
        """Draft the first ``num_nodes`` nodes of the tree.

        Args:
            hidden_states: [B, hidden], the target's state at the place where the newest token (the
                root of the next step) was drawn.
            roots: int64 [B], that token.
            num_nodes: how many nodes.

        Returns:
            Token ids, int64 [B, num_nodes].
        """
        levels = self._levels(num_nodes)
        rows = roots.new_empty(roots.shape[0], 1 + num_nodes)
        rows[:, 0] = roots
        if self.heads.info.is_sequential:
            for level in levels:
                _, best = self.heads.top_tokens_behind(
                    hidden_states, rows[:, level.paths], level.num_ranks
                )
                rows[:, level.nodes] = best.flatten(1)[:, level.places]
        else:
            num_ranks = max(level.num_ranks for level in levels)
            _, tokens = self.heads.top_tokens(hidden_states, len(levels), num_ranks)
            for level, best in zip(levels, tokens, strict=True):
                rows[:, level.nodes] = best[:, level.ranks]
        return rows[:, 1:]

    @property
    def num_candidates(self) -> int:
        """From how many tokens children are drawn."""
        info = self.heads.info
        size = info.draft_vocab_size or info.vocab_size or self.model_config.get_vocab_size()
        return min(NUM_CANDIDATES, size)

    def propose_drawn(
        self,
        hidden_states: torch.Tensor,
        roots: torch.Tensor,
        num_nodes: int,
        sampling: DraftSampling,
        noise: Callable[[int, tuple[int, ...]], torch.Tensor],
    ) -> tuple[torch.Tensor, DraftProbs]:
        """Draw the first ``num_nodes`` nodes of the tree from the heads.

        A row's children are drawn without replacement, in the order of their nodes. Plain heads
        guess the same behind all rows of a depth: they draw once for all of them, which is as good,
        as a step follows one path only.

        Args:
            hidden_states: [B, hidden], as ``propose`` takes it.
            roots: int64 [B], likewise.
            num_nodes: how many nodes.
            sampling: of the B requests.
            noise: ``noise(depth, shape)`` is exponential noise, float32, of a shape that begins
                with B; the depth of nodes (from 1) tells the calls of one draft apart.

        Returns:
            Token ids, int64 [B, num_nodes], and what each row's children were drawn from,
            [B, 1 + num_nodes, C]; of no meaning at rows without children.
        """
        levels = self._levels(num_nodes, is_drawn=True)
        batch, candidates = roots.shape[0], self.num_candidates
        rows = roots.new_empty(batch, 1 + num_nodes)
        rows[:, 0] = roots
        probs = hidden_states.new_zeros(*rows.shape, candidates, dtype=torch.float32)
        token_ids = rows.new_zeros(*rows.shape, candidates)
        is_sequential = self.heads.info.is_sequential
        if not is_sequential:
            plain = self.heads.top_tokens(hidden_states, len(levels), candidates)
        for depth, level in enumerate(levels):
            if is_sequential:
                logits, tokens = self.heads.top_tokens_behind(
                    hidden_states, rows[:, level.paths], candidates
                )
                columns = level.places
            else:
                logits, tokens = (best[depth][:, None] for best in plain)
                columns = level.ranks
            own = draft_probs(logits * self.heads.info.logit_scale, sampling)
            # The same on all ranks: they work together on what stands behind a path, and read the
            # drafts as they drew them.
            numbers = get_tp_group().broadcast(noise(depth + 1, tuple(own.shape)), src=0)
            drawn = draw_distinct(own, level.num_ranks, numbers)
            rows[:, level.nodes] = tokens.gather(-1, drawn).flatten(1)[:, columns]
            parents = level.paths[:, -1]
            probs[:, parents], token_ids[:, parents] = own, tokens
        return rows[:, 1:], DraftProbs(probs, token_ids)
