"""The heads as a module: hidden states of the target in, the best tokens of every head out.

Head k is a stack of residual blocks x + SiLU(W x + b) on the target's last hidden state, and an LM
head: its own, or the target's (Medusa paper, arXiv 2401.10774, section 2.1).
"""

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_medusa.heads.checkpoint import (
    HeadsError,
    HeadsInfo,
    inspect_heads,
    load_heads,
)


class MedusaHeads(nn.Module):
    """K heads beside a target model.

    Under tensor parallelism the blocks are replicated (they are small) and the LM heads are split
    over the vocabulary. Every rank computes the logits of its own part only, and ranks exchange
    their best tokens, never logits.
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
        rank, world = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.num_heads = num_heads or self.info.num_heads
        own_rows = None
        if self.info.vocab_size is not None:
            # Split as evenly as can be; the ranks need not follow the target's split.
            size = self.info.draft_vocab_size or model.get_vocab_size()
            own_rows = slice(size * rank // world, size * (rank + 1) // world)
        weights = load_heads(heads, revision, dtype=model.dtype, lm_head_rows=own_rows)
        # [K, L, in, out], and [K, L, 1, out] to be added to every row.
        blocks = weights.block_weight[: self.num_heads]
        self.block_weight = _frozen(blocks.transpose(2, 3).contiguous())
        self.block_bias = None
        if weights.block_bias is not None:
            self.block_bias = _frozen(weights.block_bias[: self.num_heads, :, None].contiguous())
        if weights.lm_head is not None:
            own = weights.lm_head[: self.num_heads]
            self.lm_heads = nn.ModuleList(Projection(weight) for weight in own)
            self.register_buffer("token_ids", _ids_of_rows(weights.token_map, own_rows))
        else:
            lm_head, token_ids = _shared_lm_head(target, weights.token_map, str(self.info.path))
            self.lm_heads = nn.ModuleList([lm_head])
            self.register_buffer("token_ids", token_ids)
        self.num_local_tokens = self.token_ids.shape[0]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Residual blocks of all heads. [B, hidden] -> [K, B, hidden]."""
        states = hidden_states.expand(self.num_heads, *hidden_states.shape)
        for layer in range(self.block_weight.shape[1]):
            product = torch.bmm(states, self.block_weight[:, layer])
            if self.block_bias is not None:
                product = product + self.block_bias[:, layer]
            states = states + nn.functional.silu(product)
        return states

    def top_tokens(self, hidden_states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The best tokens of every head, best first.

        Args:
            hidden_states: [B, hidden], what the target's LM head reads.
            num_tokens: how many tokens per head.

        Returns:
            Token ids of the target's vocabulary, int64 [K, B, num_tokens].
        """
        states = self(hidden_states)
        if len(self.lm_heads) == 1:  # shared (or one head only): one product for all
            logits = self.lm_heads[0](states.flatten(0, 1)).unflatten(0, states.shape[:2])
        else:
            logits = torch.stack(
                [lm_head(state) for lm_head, state in zip(self.lm_heads, states, strict=True)]
            )
        # The target's LM head is padded behind its vocabulary.
        logits = logits[..., : self.num_local_tokens]
        # Only the order counts, so the heads' logit_scale (positive) is left out.
        values, columns = logits.topk(min(num_tokens, self.num_local_tokens), dim=-1)
        tokens = self.token_ids[columns]
        if get_tensor_model_parallel_world_size() > 1:
            tokens = _merge_ranks(values, tokens, num_tokens)
        return tokens


class Projection(nn.Module):
    """x W^T through the product vLLM uses for unquantised layers (oneDNN on CPUs).

    vLLM picks the product for a layer that holds a ``weight``; this is such a layer, outside of
    vLLM's loading of the target.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """``weight``: [out, in]; kept by reference where the product does not repack it."""
        super().__init__()
        self.weight = _frozen(weight)
        if current_platform.is_cpu():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(self, remove_weight=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return dispatch_unquantized_gemm()(self, x, self.weight, None)


class SharedLMHead(nn.Module):
    """The target's LM head, used in place: this rank's part of the vocabulary, no copy."""

    def __init__(self, lm_head: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the target's parameters do not become ours too.
        self._lm_head = (lm_head,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, this rank's part of the padded vocabulary]."""
        lm_head = self._lm_head[0]
        return lm_head.quant_method.apply(lm_head, x, bias=getattr(lm_head, "bias", None))


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _ids_of_rows(token_map: torch.Tensor | None, rows: slice | None) -> torch.Tensor:
    assert rows is not None
    return torch.arange(rows.start, rows.stop) if token_map is None else token_map[rows]


def _shared_lm_head(
    target: nn.Module, token_map: torch.Tensor | None, heads: str
) -> tuple[nn.Module, torch.Tensor]:
    """The target's LM head, or its rows of the draft vocabulary, and the token id of each row."""
    lm_head = getattr(target, "lm_head", None)
    if lm_head is None or not hasattr(lm_head, "shard_indices"):
        raise HeadsError(
            f"medusa heads {heads} hold no LM head, and the target {type(target).__name__} "
            "has none to share ('lm_head'): use heads with their own LM heads"
        )
    shard = lm_head.shard_indices
    start, stop = shard.org_vocab_start_index, shard.org_vocab_end_index
    if token_map is None:
        return SharedLMHead(lm_head), torch.arange(start, stop)
    if not isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod):
        raise HeadsError(
            f"medusa heads {heads} use a draft vocabulary (token_map), which needs rows of the "
            f"target's LM head, but that is quantised ({type(lm_head.quant_method).__name__}): "
            "use heads without token_map, or with their own LM heads"
        )
    if getattr(lm_head, "bias", None) is not None:
        raise HeadsError(
            f"medusa heads {heads} use a draft vocabulary (token_map), but the LM head of the "
            f"target {type(target).__name__} has a bias: use heads without token_map"
        )
    mine = token_map[(token_map >= start) & (token_map < stop)]
    # A rank may hold no token of the draft vocabulary. Products without rows fail in some kernels,
    # so one row is kept, which top_tokens cuts off again.
    rows = mine - start if len(mine) else torch.zeros(1, dtype=torch.int64)
    return Projection(lm_head.weight.data[rows].contiguous()), mine


def _merge_ranks(values: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The best tokens over all ranks, from each rank's best.

    One collective of 2 x num_tokens numbers per row and rank. Token ids travel as float32, which
    holds whole numbers up to 2**24, because vLLM's CPU collective takes no integers.
    """
    missing = num_tokens - values.shape[-1]  # a rank may hold fewer tokens than are asked for
    values = nn.functional.pad(values.float(), (0, missing), value=-torch.inf)
    tokens = nn.functional.pad(tokens.float(), (0, missing))
    gathered = tensor_model_parallel_all_gather(torch.cat([values, tokens], dim=-1))
    values, tokens = gathered.unflatten(-1, (-1, 2, num_tokens)).unbind(dim=-2)
    best = values.flatten(-2).topk(num_tokens, dim=-1).indices
    return tokens.flatten(-2).gather(-1, best).long()
