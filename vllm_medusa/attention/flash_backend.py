"""Attention on GPUs: vLLM's FlashAttention backend, with trees.

FlashAttention knows causal or not, but no mask. It computes the context of the short requests,
which all their rows see, our kernel their own keys, and vLLM's merge_attn_states adds both up by
their log-sum-exps. So a long context costs what it costs FlashAttention.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from vllm_medusa.attention.short_requests import (
    TreeBackend,
    TreeImpl,
    TreeMetadata,
    TreeMetadataBuilder,
)
from vllm_medusa.attention.triton_tree import tree_attention


@dataclass
class TreeFlashMetadata(TreeMetadata):
    """Also, where no request is computed twice, the contexts of the short ones.

    Attributes:
        context: the short requests, not causal, with their contexts' lengths as ``seq_lens``.
    """

    context: FlashAttentionMetadata | None = None


class TreeFlashMetadataBuilder(TreeMetadataBuilder, FlashAttentionMetadataBuilder):
    """Splits a batch with trees into requests for both kernels and requests for the stock one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Static, for CUDA graphs; build() fills it before each replay.
        self.context_lens = torch.zeros(
            self.vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=self.device
        )

    def _build_with_trees(
        self,
        common: CommonAttentionMetadata,
        query_lens: torch.Tensor,
        num_short: int,
        first_stock: int,
    ) -> TreeFlashMetadata:
        trees = super()._build_with_trees(common, query_lens, num_short, first_stock)
        metadata = TreeFlashMetadata(**vars(trees))
        if metadata.is_sorted:
            short = metadata.short
            context_lens = self.context_lens[:num_short]
            torch.sub(short.seq_lens, short.query_start_loc.diff(), out=context_lens)
            metadata.context = FlashAttentionMetadataBuilder.build(
                self,
                0,
                replace(
                    common,
                    query_start_loc=short.query_start_loc,
                    query_start_loc_cpu=common.query_start_loc_cpu[: num_short + 1],
                    seq_lens=context_lens,
                    num_reqs=num_short,
                    num_actual_tokens=metadata.num_short_tokens,
                    max_query_len=short.max_rows,
                    block_table_tensor=short.block_table,
                    causal=False,
                ),
            )
        return metadata


class TreeFlashImpl(TreeImpl, FlashAttentionImpl):
    """Attention of one layer."""

    def _attend_short(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> None:
        if metadata.context is None:
            tree_attention(query, kv_cache, output, metadata.short, self.scale)
            return
        tokens = metadata.num_short_tokens
        self._attend_in_two_parts(query[:tokens], kv_cache, output[:tokens], metadata)

    def _attend_in_two_parts(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
        metadata: TreeFlashMetadata,
    ) -> None:
        context, context_lse = self._attend_to_context(query, kv_cache, metadata.context)
        # As merge_attn_states wants them: both outputs contiguous, log-sum-exps [heads, tokens].
        own = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        own_lse = torch.empty(
            (query.shape[1], query.shape[0]), dtype=torch.float32, device=query.device
        )
        tree_attention(
            query, kv_cache, own, metadata.short, self.scale, lse=own_lse, with_context=False
        )
        merge_attn_states(output, context, context_lse, own, own_lse)

    def _attend_to_context(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the contexts alone, [tokens, heads, head_size], and its log-sum-exp,
        [heads, tokens].

        Of an empty context FlashAttention 2 says zeros and +inf, 3 says zeros and -inf;
        merge_attn_states takes both for a part that counts for nothing.
        """
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        context, lse, *_ = flash_attn.flash_attn_varlen_func(
            q=query,
            k=flash_attn.canonicalize_singleton_dim_strides(key_cache),
            v=flash_attn.canonicalize_singleton_dim_strides(value_cache),
            out=out,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            seqused_k=metadata.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=metadata.block_table,
            return_softmax_lse=True,
            scheduler_metadata=metadata.scheduler_metadata,
            fa_version=self.vllm_flash_attn_version,
            num_splits=metadata.max_num_splits,
        )
        return context, lse


class TreeFlashBackend(TreeBackend, FlashAttentionBackend):
    """vLLM's FlashAttention backend with trees."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return TreeFlashMetadataBuilder
