"""Attention on CPUs: vLLM's backend, with our kernel for the rows of trees.

The stock kernel knows causal or not, but no mask. Batches mix prefill chunks, plain decodes and
trees: prefill chunks go through the stock kernel, everything else through ours, each in one call.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_medusa.attention.kernels import TreeRows, tree_attention
from vllm_medusa.attention.registration import backend_in_place_of
from vllm_medusa.attention.trees_of_batch import TreesOfBatch

logger = init_logger(f"vllm.{__name__}")

# Key layout of a block that the tree kernel reads: [head, block], values [block, head]. vLLM picks
# "amx" for bfloat16 on machines that have it; its packed layout is another one.
READABLE_ISA = ("vec", "vec16")


@dataclass
class PrefillRows:
    """The prefill chunks of a batch with trees, as a small batch of their own."""

    rows: torch.Tensor
    """int64 [rows], index into the step's tokens."""
    metadata: CPUAttentionMetadata


@dataclass
class TreeCPUAttentionMetadata(CPUAttentionMetadata):
    """The stock metadata and, with trees in the batch, what each of the two kernels computes."""

    tree: TreeRows | None = None
    prefill: PrefillRows | None = None


class TreeCPUAttentionMetadataBuilder(TreesOfBatch, CPUAttentionMetadataBuilder):
    """Splits a batch with trees into rows for our kernel and rows for the stock one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.isa: str
        if self.isa not in READABLE_ISA:
            logger.info_once("Medusa: KV cache in layout 'vec' in place of '%s'.", self.isa)
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common, tree_index = common_attn_metadata, self.tree_index
        if tree_index is None:
            return super().build(common_prefix_len, common, fast_build)
        assert self.ancestors is not None
        return TreeCPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            tree=TreeRows(
                query_start_loc=common.query_start_loc,
                seq_lens=common.seq_lens,
                block_table=common.block_table_tensor,
                tree_index=tree_index,
                ancestors=self.ancestors,
            ),
            prefill=self._prefill_rows(common, tree_index < 0),
        )

    def _prefill_rows(
        self, common: CommonAttentionMetadata, is_prefill: torch.Tensor
    ) -> PrefillRows | None:
        if not is_prefill.any():
            return None
        lengths = common.query_start_loc.diff()
        rows = is_prefill.repeat_interleave(lengths).nonzero().squeeze(1)
        start_loc = torch.zeros(int(is_prefill.sum()) + 1, dtype=torch.int32)
        torch.cumsum(lengths[is_prefill], dim=0, out=start_loc[1:])
        batch = replace(
            common,
            query_start_loc=start_loc,
            query_start_loc_cpu=start_loc,
            seq_lens=common.seq_lens[is_prefill],
            num_reqs=start_loc.shape[0] - 1,
            num_actual_tokens=rows.shape[0],
            block_table_tensor=common.block_table_tensor[is_prefill],
            slot_mapping=common.slot_mapping[rows],
        )
        return PrefillRows(rows, super().build(0, batch))


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of one layer."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes as in ``CPUAttentionBackendImpl.forward``; keys and values are in the cache
        already."""
        stock = super().forward
        if not isinstance(attn_metadata, TreeCPUAttentionMetadata):
            return stock(
                layer, query, key, value, kv_cache, attn_metadata,
                output, output_scale, output_block_scale,
            )  # fmt: skip
        assert attn_metadata.tree is not None
        if (prefill := attn_metadata.prefill) is not None:
            rows = prefill.rows
            part = torch.empty_like(output[: rows.shape[0]])
            stock(layer, query[rows], key, value, kv_cache, prefill.metadata, part)
            output[rows] = part
        tokens = attn_metadata.num_actual_tokens
        tree_attention(query[:tokens], kv_cache, output[:tokens], attn_metadata.tree, self.scale)
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend with trees."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder


def tree_attention_backend() -> AbstractContextManager[None]:
    """Have layers that are built meanwhile use our backend."""
    return backend_in_place_of(AttentionBackendEnum.CPU_ATTN, TreeCPUAttentionBackend)
