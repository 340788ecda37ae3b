"""How a runner tells the builder of attention metadata of a batch's trees."""

import torch


class TreesOfBatch:
    """Mixin before a metadata builder of vLLM's.

    Attributes:
        tree_index: int32 [requests or more], each request's tree; None: no request has one.
        ancestors: int64 [trees, rows, 2], what the rows of each tree see (``TreeBank.ancestors``).
    """

    tree_index: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None

    def set_trees(self, tree_index: torch.Tensor | None, ancestors: torch.Tensor) -> None:
        """Say which tree each request of the next batch has; the runner calls it before ``build``.

        CUDA graphs read both buffers when they are replayed: they must be the same ones each time.

        Args:
            tree_index: int32 [requests or more], index into ``ancestors``; -1 where the rows are
                causal, as those of prefill chunks are. None: no request of the batch has a tree and
                the batch runs in no graph that was captured with trees; the stock backend computes
                it all.
            ancestors: int64 [trees, rows, 2], ``TreeBank.ancestors``.
        """
        self.tree_index, self.ancestors = tree_index, ancestors
