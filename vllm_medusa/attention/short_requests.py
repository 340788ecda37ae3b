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
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from vllm_medusa.attention.triton_tree import TreeBatch
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


class TreeMetadataBuilder:
    """Mixin before a stock metadata builder: splits the batches that have trees."""

    # Batches of short requests only. Mixed batches run two kernels, over rows that the host picks.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    # For speculators that run layers of their own; Medusa's heads have no attention.
    supports_draft_decode_metadata_update = False
    supports_update_block_table = False

    tree_index: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None

    def set_trees(self, tree_index: torch.Tensor | None, ancestors: torch.Tensor) -> None:
        """Say which tree each request of the next batch has; the runner calls it before ``build``.

        CUDA graphs read both buffers when they are replayed: they must be the same ones each time.

        Args:
            tree_index: int32 [requests or more], index into ``ancestors``; -1 where the rows are
                causal. None: no request of the batch has a tree and the batch runs in no graph that
                was captured with trees; the stock backend computes it all.
            ancestors: int64 [trees, MAX_ROWS, 2], ``TreeBank.ancestors``.
        """
        self.tree_index, self.ancestors = tree_index, ancestors

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
