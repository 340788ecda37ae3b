"""LM heads: the heads' own or the target's, whole or rows of a draft vocabulary, over ranks."""

import torch
from torch import nn
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_medusa.heads.formats import HeadsError


class DraftLMHead(nn.Module):
    """What turns the states of heads into their best tokens.

    Under tensor parallelism each rank computes the logits of its own part of the vocabulary, and
    ranks exchange their best tokens, never logits.
    """

    def __init__(self, products: list[nn.Module], token_ids: torch.Tensor) -> None:
        """``products``: one per head, or one for all. ``token_ids``: [V], of this rank's rows."""
        super().__init__()
        self.products = nn.ModuleList(products)
        self.register_buffer("token_ids", token_ids)
        self.num_local_tokens = token_ids.shape[0]

    def logits(self, states: torch.Tensor, head: int) -> torch.Tensor:
        """[rows, hidden] of one head -> [rows, this rank's part of the draft vocabulary]."""
        product = self.products[head if len(self.products) > 1 else 0]
        # The target's LM head is padded behind its vocabulary.
        return product(states)[..., : self.num_local_tokens]

    def all_logits(self, states: torch.Tensor) -> torch.Tensor:
        """[K, rows, hidden] of all heads -> [K, rows, V]; a shared LM head takes one product."""
        if len(self.products) == 1:
            return self.logits(states.flatten(0, 1), 0).unflatten(0, states.shape[:2])
        return torch.stack([self.logits(state, head) for head, state in enumerate(states)])

    def best_tokens(
        self, logits: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens by logits, best first: [..., V] -> logits, [..., num_tokens], and token
        ids, int64 [..., num_tokens]."""
        values, columns = logits.topk(min(num_tokens, self.num_local_tokens), dim=-1)
        tokens = self.token_ids[columns]
        if get_tensor_model_parallel_world_size() > 1:
            values, tokens = _merge_ranks(values, tokens, num_tokens)
        return values, tokens


class Projection(nn.Module):
    """x W^T + b through the product vLLM uses for unquantised layers (oneDNN on CPUs).

    vLLM picks the product for a layer that holds a ``weight``; this is such a layer, outside of
    vLLM's loading of the target.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """``weight``: [out, in], kept by reference where the product does not repack it; ``bias``:
        [out]."""
        super().__init__()
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)
        if current_platform.is_cpu():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(self, remove_weight=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return dispatch_unquantized_gemm()(self, x, self.weight, self.bias)


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


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def shared_lm_head(
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
    # so one row is kept, which DraftLMHead cuts off again.
    rows = mine - start if len(mine) else torch.zeros(1, dtype=torch.int64)
    return Projection(lm_head.weight.data[rows].contiguous()), mine


def _merge_ranks(
    values: torch.Tensor, tokens: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens over all ranks, and their logits, from each rank's best.

    One collective of 2 x num_tokens numbers per row and rank. Token ids travel as float32, which
    holds whole numbers up to 2**24, because vLLM's CPU collective takes no integers.
    """
    missing = num_tokens - values.shape[-1]  # a rank may hold fewer tokens than are asked for
    values = nn.functional.pad(values.float(), (0, missing), value=-torch.inf)
    tokens = nn.functional.pad(tokens.float(), (0, missing))
    gathered = tensor_model_parallel_all_gather(torch.cat([values, tokens], dim=-1))
    values, tokens = gathered.unflatten(-1, (-1, 2, num_tokens)).unbind(dim=-2)
    values, best = values.flatten(-2).topk(num_tokens, dim=-1)
    return values, tokens.flatten(-2).gather(-1, best).long()
