"""GPU backends with trees, what they share: who computes which requests of a step.

Our kernel computes the short requests, of up to ``MAX_ROWS`` rows: trees, plain decodes and short
prompt chunks. vLLM's computes the long ones, which are prompt chunks all. vLLM's V2 runner sorts a
batch by length behind the requests with drafts, so that the short ones lead; where they do not, the
stock kernel computes the whole batch and ours then the short requests anew.

Decode steps consist of short requests only: one launch of our kernel, over static buffers, which
CUDA graphs can hold.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
)

from vllm_medusa.attention.trees_of_batch import TreesOfBatch
from vllm_medusa.attention.triton_tree import MAX_HEAD_SIZE, TreeBatch
from vllm_medusa.tree import MAX_ROWS


@dataclass
class TreeMetadata:
    """Attention metadata of a step with trees.

    Attributes:
        num_actual_tokens: of the step, CUDA-graph padding included.
        short: what our kernel computes.
        num_short_tokens: tokens of the step, from the first on, that hold the rows of ``short``.
        stock: the stock backend's metadata of the requests that it computes, first; None: of none.
        first_stock_token: token of the step where those requests begin.
    """

    num_actual_tokens: int
    short: TreeBatch
    num_short_tokens: int
    stock: Any | None
    first_stock_token: int

    @property
    def is_sorted(self) -> bool:
        """No request is computed twice."""
        return self.stock is None or self.first_stock_token == self.num_short_tokens


class TreeMetadataBuilder(TreesOfBatch):
    """Mixin before a stock metadata builder: splits the batches that have trees."""

    # Batches of short requests only. Mixed batches run two kernels, over rows that the host picks.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    # For speculators that run layers of their own; Medusa's heads have no attention.
    supports_draft_decode_metadata_update = False
    supports_update_block_table = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """The stock metadata where there are no trees, ``TreeMetadata`` where there are."""
        common = common_attn_metadata
        query_lens = common.query_start_loc_cpu[: common.num_reqs + 1].diff()
        num_short, first_stock = split_batch(query_lens)
        if self.tree_index is None or num_short == 0:
            return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        return self._build_with_trees(common, query_lens, num_short, first_stock)

    def _build_with_trees(
        self,
        common: CommonAttentionMetadata,
        query_lens: torch.Tensor,
        num_short: int,
        first_stock: int,
    ) -> TreeMetadata:
        assert self.tree_index is not None and self.ancestors is not None
        stock, first_stock_token = None, common.num_actual_tokens
        if first_stock < common.num_reqs:
            long = requests_from(common, first_stock)
            stock = super().build(0, long, fast_build=True)  # type: ignore[misc]
            first_stock_token = int(common.query_start_loc_cpu[first_stock])
        if num_short == common.num_reqs:
            # In graphs, the longest that may come; the host's lengths are those of a dummy batch.
            num_short_tokens, max_rows = common.num_actual_tokens, common.max_query_len
        else:
            num_short_tokens = first_stock_token
            max_rows = int(query_lens[:num_short].max())
        return TreeMetadata(
            num_actual_tokens=common.num_actual_tokens,
            short=TreeBatch(
                query_start_loc=common.query_start_loc[: num_short + 1],
                seq_lens=common.seq_lens[:num_short],
                block_table=common.block_table_tensor[:num_short],
                tree_index=self.tree_index[:num_short],
                ancestors=self.ancestors,
                max_rows=min(max_rows, MAX_ROWS),
                max_seq_len=common.max_seq_len,
            ),
            num_short_tokens=num_short_tokens,
            stock=stock,
            first_stock_token=first_stock_token,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As ``build``; the stock builder would set all lengths to 1, less than a tree's rows."""
        if self.tree_index is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        return self.build(0, common_attn_metadata)


class TreeImpl:
    """Mixin before a stock implementation of a layer's attention: the stock one computes its
    requests, ``_attend_short`` the others."""

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *scales: torch.Tensor | None,
        **more_scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shapes as in vLLM's ``AttentionImpl.forward``; keys and values are in the cache
        already."""
        stock = super().forward  # type: ignore[misc]
        if not isinstance(attn_metadata, TreeMetadata):
            return stock(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more_scales
            )
        if attn_metadata.stock is not None:
            first = attn_metadata.first_stock_token
            stock(layer, query[first:], key, value, kv_cache, attn_metadata.stock, output[first:])
        self._attend_short(query, kv_cache, output, attn_metadata)
        return output

    def _attend_short(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, metadata: Any
    ) -> None:
        """Write the attention of ``metadata.short`` into ``output``."""
        raise NotImplementedError


class TreeBackend:
    """Mixin before a stock backend: what it offers with trees."""

    # A quantised cache was not tested.
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return super().supports_head_size(head_size) and head_size <= MAX_HEAD_SIZE  # type: ignore[misc]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """How contexts are split, and with it the rounding, depends on the batch."""
        return False


def split_batch(query_lens: torch.Tensor) -> tuple[int, int]:
    """Who computes which requests.

    Args:
        query_lens: int [B], rows of each request, on the host.

    Returns:
        num_short: our kernel computes the short ones among the first ``num_short`` requests.
        first_stock: the stock kernel computes the requests from ``first_stock`` on, before.
    """
    num_requests = query_lens.shape[0]
    is_long = query_lens > MAX_ROWS
    if not is_long.any():
        return num_requests, num_requests
    first_long = int(is_long.int().argmax())
    if is_long[first_long:].all():
        return first_long, first_long
    return num_requests, 0


def requests_from(common: CommonAttentionMetadata, first: int) -> CommonAttentionMetadata:
    """The requests from ``first`` on, as a batch of their own; without a device synchronisation."""
    if first == 0:
        return common
    first_token = int(common.query_start_loc_cpu[first])
    start_loc_cpu = common.query_start_loc_cpu[first : common.num_reqs + 1] - first_token
    bounds, prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling
    return replace(
        common,
        query_start_loc=common.query_start_loc[first : common.num_reqs + 1] - first_token,
        query_start_loc_cpu=start_loc_cpu,
        seq_lens=common.seq_lens[first : common.num_reqs],
        num_reqs=common.num_reqs - first,
        num_actual_tokens=common.num_actual_tokens - first_token,
        max_query_len=int(start_loc_cpu.diff().max()),
        block_table_tensor=common.block_table_tensor[first:],
        slot_mapping=common.slot_mapping[first_token:],
        seq_lens_cpu_upper_bound=None if bounds is None else bounds[first:],
        is_prefilling=None if prefilling is None else prefilling[first:],
        positions=None if common.positions is None else common.positions[first_token:],
        req_idx=None if common.req_idx is None else common.req_idx[first:],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
