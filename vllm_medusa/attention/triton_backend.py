"""Attention on GPUs: vLLM's Triton backend, with our kernel for short requests and trees."""

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from vllm_medusa.attention.short_requests import TreeMetadata, TreeMetadataBuilder
from vllm_medusa.attention.triton_tree import MAX_HEAD_SIZE, tree_attention
from vllm_medusa.tree import MAX_ROWS


class TreeTritonMetadataBuilder(TreeMetadataBuilder, TritonAttentionMetadataBuilder):
    """Splits a batch with trees into requests for our kernel and requests for the stock one."""

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, *unused: Any) -> int:
        """Our kernel reads each request's rows on the device: a graph of decodes takes any mix."""
        return MAX_ROWS


class TreeTritonImpl(TritonAttentionImpl):
    """Attention of one layer."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernel does not quantise what it writes."""
        return False

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | TreeMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes as in ``TritonAttentionImpl.forward``; keys and values are in the cache
        already."""
        stock = super().forward
        if not isinstance(attn_metadata, TreeMetadata):
            return stock(
                layer, query, key, value, kv_cache, attn_metadata,
                output, output_scale, output_block_scale,
            )  # fmt: skip
        if attn_metadata.stock is not None:
            first = attn_metadata.first_stock_token
            stock(
                layer, query[first:], key, value, kv_cache, attn_metadata.stock, output[first:]
            )  # fmt: skip
        tree_attention(query, kv_cache, output, attn_metadata.short, self.scale)
        return output


class TreeTritonBackend(TritonAttentionBackend):
    """vLLM's Triton backend with trees."""

    # A quantised cache was not tested.
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TreeTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return TreeTritonMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return super().supports_head_size(head_size) and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """How contexts are split, and with it the rounding, depends on the batch."""
        return False
