"""The heads as a module: hidden states of the target in, the best tokens of every head out.

Head k is a stack of residual blocks x + SiLU(W x + b) on the target's last hidden state, and an LM
head: its own, or the target's (Medusa paper, arXiv 2401.10774, section 2.1). The first block of a
sequential head also reads the embeddings of the tokens on the path to its guess (Hydra, arXiv
2402.05109).
"""

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from vllm_medusa.heads.checkpoint import (
    HeadsError,
    HeadsInfo,
    HeadsWeights,
    inspect_heads,
    load_heads,
)
from vllm_medusa.heads.lm_head import DraftLMHead, Projection, frozen, shared_lm_head


class MedusaHeads(nn.Module):
    """K heads beside a target model.

    Under tensor parallelism the blocks are replicated (they are small) and the LM heads are split
    over the vocabulary.
    """

    def __init__(
        self,
        heads: str,
        revision: str | None,
        target: nn.Module,
        model: ModelConfig,
        num_heads: int | None = None,
    ) -> None:
        """Load heads for a loaded target.

        Args:
            heads: folder or hub id, as ``inspect_heads`` takes it.
            revision: of the hub id.
            target: the loaded target; its LM head is shared by heads that have none.
            model: the target's configuration.
            num_heads: keep the first so many heads only; None: all.

        Raises:
            HeadsError: bad tensors, or an LM head that cannot be shared.
        """
        super().__init__()
        self.info: HeadsInfo = inspect_heads(heads, revision)
        self.num_heads = num_heads or self.info.num_heads
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        own_rows = None
        if self.info.vocab_size is not None:
            # Split as evenly as can be; the ranks need not follow the target's split.
            size = self.info.draft_vocab_size or model.get_vocab_size()
            own_rows = slice(size * rank // world, size * (rank + 1) // world)
        weights = load_heads(heads, revision, dtype=model.dtype, lm_head_rows=own_rows)
        if self.info.is_sequential:
            self._set_path_blocks(weights, target)
        else:
            self._set_blocks(weights)
        if weights.lm_head is not None:
            assert own_rows is not None
            products = [Projection(weight) for weight in weights.lm_head[: self.num_heads]]
            self.lm_head = DraftLMHead(products, _ids_of_rows(weights.token_map, own_rows))
        else:
            product, token_ids = shared_lm_head(target, weights.token_map, str(self.info.path))
            self.lm_head = DraftLMHead([product], token_ids)

    def _set_blocks(self, weights: HeadsWeights) -> None:
        # [K, L, in, out], and [K, L, 1, out] to be added to every row.
        blocks = weights.block_weight[: self.num_heads]
        self.block_weight = frozen(blocks.transpose(2, 3).contiguous())
        self.block_bias = None
        if weights.block_bias is not None:
            self.block_bias = frozen(weights.block_bias[: self.num_heads, :, None].contiguous())

    def _set_path_blocks(self, weights: HeadsWeights, target: nn.Module) -> None:
        assert weights.path_weight is not None
        if not hasattr(target, "embed_input_ids"):
            raise HeadsError(
                f"medusa heads {self.info.source} are sequential: they read the target's token "
                f"embeddings, which {type(target).__name__} does not offer (embed_input_ids)"
            )
        # Not an attribute of its own: the target's parameters would become ours too.
        self._target = (target,)
        self.path_blocks = nn.ModuleList()
        for head in range(self.num_heads):
            first, *more = weights.block_weight[head]
            first = torch.cat([first, weights.path_weight[head]], dim=1)
            biases = weights.block_bias[head] if weights.block_bias is not None else None
            self.path_blocks.append(
                nn.ModuleList(
                    Projection(weight, None if biases is None else biases[layer])
                    for layer, weight in enumerate([first, *more])
                )
            )

    def forward(self, hidden_states: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Residual blocks of the first plain heads. [B, hidden] -> [num_heads, B, hidden]."""
        states = hidden_states.expand(num_heads, *hidden_states.shape)
        for layer in range(self.block_weight.shape[1]):
            product = torch.bmm(states, self.block_weight[:num_heads, layer])
            if self.block_bias is not None:
                product = product + self.block_bias[:num_heads, layer]
            states = states + nn.functional.silu(product)
        return states

    def top_tokens(
        self, hidden_states: torch.Tensor, num_heads: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of the first plain heads, best first.

        Args:
            hidden_states: [B, hidden], what the target's LM head reads.
            num_heads: how many heads.
            num_tokens: how many tokens per head.

        Returns:
            Their logits, without the heads' ``logit_scale``, and their ids in the target's
            vocabulary (int64), [num_heads, B, num_tokens] each.
        """
        logits = self.lm_head.all_logits(self(hidden_states, num_heads))
        return self.lm_head.best_tokens(logits, num_tokens)

    def top_tokens_behind(
        self, hidden_states: torch.Tensor, paths: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of one sequential head behind each of several paths, best first.

        Args:
            hidden_states: [B, hidden], what the target's LM head reads.
            paths: int64 [B, P, k], token ids of the root and of the k - 1 nodes behind it; their
                number k says which head is asked.
            num_tokens: how many tokens per path.

        Returns:
            Their logits, without the heads' ``logit_scale``, and their ids in the target's
            vocabulary (int64), [B, P, num_tokens] each.
        """
        batch, num_paths, number = paths.shape
        embeddings = self._target[0].embed_input_ids(paths.flatten()).view(batch, num_paths, -1)
        states = hidden_states[:, None].expand(-1, num_paths, -1)
        first, *more = self.path_blocks[number - 1]
        states = states + nn.functional.silu(first(torch.cat([states, embeddings], dim=-1)))
        for block in more:
            states = states + nn.functional.silu(block(states))
        logits = self.lm_head.logits(states.flatten(0, 1), number - 1)
        return self.lm_head.best_tokens(logits.view(batch, num_paths, -1), num_tokens)


def _ids_of_rows(token_map: torch.Tensor | None, rows: slice) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop) if token_map is None else token_map[rows]
