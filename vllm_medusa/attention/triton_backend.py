"""Attention on GPUs: vLLM's Triton backend, with our kernel for short requests and trees."""

from typing import Any

import torch
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from vllm_medusa.attention.short_requests import TreeBackend, TreeImpl, TreeMetadataBuilder
from vllm_medusa.attention.triton_tree import tree_attention


class TreeTritonMetadataBuilder(TreeMetadataBuilder, TritonAttentionMetadataBuilder):
    """Splits a batch with trees into requests for our kernel and requests for the stock one."""


class TreeTritonImpl(TreeImpl, TritonAttentionImpl):
    """Attention of one layer."""

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Our kernel does not quantise what it writes."""
        return False

    def _attend_short(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> None:
        tree_attention(query, kv_cache, output, metadata.short, self.scale)


class TreeTritonBackend(TreeBackend, TritonAttentionBackend):
    """vLLM's Triton backend with trees."""

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return TreeTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return TreeTritonMetadataBuilder
