"""Drafting: hidden states to the tokens of a tree, one top-k per head and one gather."""

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_medusa.heads.module import MedusaHeads
from vllm_medusa.tree import TokenTree


class MedusaDrafter:
    """Fills the nodes of a token tree from the heads."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.config = vllm_config.speculative_config
        self.model_config = vllm_config.model_config
        self.tree: TokenTree = self.config.token_tree
        self.num_ranks = max(self.tree.num_ranks)
        # Node -> its place among the tokens [depth, rank] of the heads.
        places = (self.tree.row_depths()[1:] - 1) * self.num_ranks + self.tree.ranks()
        self.places = torch.from_numpy(places).to(device)

    def load_model(self, target: nn.Module) -> None:
        """Load the heads; called by the runner once the target is loaded."""
        # Heads deeper than the tree would be computed for nothing.
        self.heads = MedusaHeads(
            self.config.model,
            self.config.revision,
            target,
            self.model_config,
            num_heads=self.tree.depth,
        )

    def propose(self, hidden_states: torch.Tensor, num_nodes: int) -> torch.Tensor:
        """Draft the first ``num_nodes`` nodes of the tree.

        Args:
            hidden_states: [B, hidden], the target's state at the place where the newest token (the
                root of the next step) was drawn.
            num_nodes: how many nodes.

        Returns:
            Token ids, int64 [B, num_nodes].
        """
        tokens = self.heads.top_tokens(hidden_states, self.num_ranks)
        return tokens.transpose(0, 1).flatten(1)[:, self.places[:num_nodes]]
