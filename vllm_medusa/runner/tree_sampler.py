"""Acceptance on vLLM's V2 model runner, in the place of its rejection sampler.

As a rule the token of every row is drawn at once, by vLLM's own sampler, and one launch walks the
trees. Requests whose rules look back at their text (penalties, bad words, thinking budgets, custom
processors) are then walked anew, depth by depth: each step draws one token per request with the
path's tokens added to the request's state, so that every rule sees what it would see without
speculation. Nothing waits for the device in either. vLLM keys the noise of sampling by seed and
position, so both draw the very tokens that are drawn without speculation.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_medusa.acceptance import NO_TOKEN, AcceptedPaths, walk
from vllm_medusa.acceptance_kernel import walk_drawn_tokens
from vllm_medusa.agreement import decide_once
from vllm_medusa.runner.draft_rules import DrawnRows, build_draft_rule

if TYPE_CHECKING:
    from vllm_medusa.runner.model_state import TreeModelState

# Of the logits, that a rule which looks at drafts holds at once (draft_rules.py).
COPIES_OF_RULE = 4


class TreeSampler:
    """Draws tokens from the target along the trees of a batch."""

    # What vLLM's warm-up asks its rejection sampler for.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler, state: "TreeModelState") -> None:
        self.sampler = sampler
        self.state = state
        self.req_states = sampler.req_states
        self.rule = build_draft_rule(sampler, state)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Accept a path per request and compact it.

        Args:
            logits: [rows, V], of all requests' rows: root, then nodes.
            input_batch: vLLM's description of the step.
            draft_logits: not used: what drafts were drawn from, if they were, the state keeps.
            invalid_drafts: bool [rows], nodes whose rows no grammar's mask was made for, because
                the engine core did not know their tokens or their path breaks the grammar.

        Returns:
            As vLLM's ``RejectionSampler`` does; ``sampled_token_ids`` is [B, depth + 1].
        """
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        drafts = input_batch.input_ids[input_batch.logits_indices]
        if invalid_drafts is not None:
            drafts = drafts.masked_fill(invalid_drafts, NO_TOKEN)
        processed = logits

        def decide() -> AcceptedPaths:
            nonlocal processed
            paths, processed = self._walk(logits, drafts, input_batch)
            return paths

        # Logprobs count on the rank that decides only.
        paths = decide_once(decide, input_batch.num_reqs, self.state.num_steps, logits.device)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (paths.tokens >= 0).sum(dim=1, dtype=torch.int32),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        self.state.keep(paths, input_batch)
        is_processed = self.sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        return SamplerOutput(
            sampled_token_ids=paths.tokens,
            logprobs_tensors=self._logprobs(
                processed if is_processed else logits, paths, input_batch
            ),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _walk(
        self, logits: torch.Tensor, drafts: torch.Tensor, batch: InputBatch
    ) -> tuple[AcceptedPaths, torch.Tensor]:
        """The accepted paths, and the logits that their tokens were drawn from, [rows, V].

        ``drafts``: integers [rows], the tokens of nodes at their rows; ``NO_TOKEN``: not valid.
        """
        index = batch.idx_mapping_np
        by_rule = self.rule.is_for(batch)
        # What is too much at once is walked depth by depth: a row per request.
        limit = get_max_chunk_logits(logits.shape[1])
        by_depth = self.state.looks_back[index]
        if np.diff(batch.cu_num_logits_np)[by_rule].sum() * COPIES_OF_RULE > limit:
            by_depth = by_depth | by_rule
        # Fused samplers keep to themselves what top-k and top-p leave of a distribution.
        has_flashinfer = self.sampler.use_flashinfer
        self.sampler.use_flashinfer = has_flashinfer and not by_rule.any()
        try:
            # vLLM's sampler copies logits that it changes, those of all rows at once.
            if logits.shape[0] > limit and self.sampler.needs_logits_processing[index].any():
                processed = torch.empty_like(logits, dtype=torch.float32)
                everyone = np.arange(batch.num_reqs)
                paths = self._walk_by_depth(logits, drafts, batch, everyone, by_rule, processed)
                return paths, processed
            paths, processed = self._walk_drawn(logits, drafts, batch, by_rule & ~by_depth)
            if by_depth.any():
                places = np.flatnonzero(by_depth)
                own = self._walk_by_depth(logits, drafts, batch, places, by_rule, processed)
                requests = async_tensor_h2d(places, device=logits.device)
                paths.tokens[requests], paths.rows[requests] = own
            return paths, processed
        finally:
            self.sampler.use_flashinfer = has_flashinfer

    def _walk_drawn(
        self, logits: torch.Tensor, drafts: torch.Tensor, batch: InputBatch, by_rule: np.ndarray
    ) -> tuple[AcceptedPaths, torch.Tensor]:
        """Draw at all rows, then walk; ``by_rule``: bool [B], the requests that the rule is for."""
        positions = batch.positions[batch.logits_indices]
        drawn, processed = self.sampler.sample(
            logits,
            batch.expanded_idx_mapping,
            batch.idx_mapping,
            batch.idx_mapping_np,
            positions,
            batch.input_ids[batch.logits_indices],
            batch.expanded_local_pos,
            batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=self._wants_logprobs(batch),
        )
        if by_rule.any():
            sizes_np = np.diff(batch.cu_num_logits_np)
            places_np = np.flatnonzero(np.repeat(by_rule, sizes_np))
            places = async_tensor_h2d(places_np, device=logits.device)
            sizes = async_tensor_h2d(np.repeat(sizes_np, sizes_np)[places_np], device=logits.device)
            slots = batch.expanded_idx_mapping[places]
            rows = batch.expanded_local_pos[places].long()
            children = self._children(drafts, slots, rows, places - rows, sizes)
            at = DrawnRows(
                drawn[places], processed[places], children, slots, rows, positions[places]
            )
            drawn[places] = self.rule.choose(at)
        paths = walk_drawn_tokens(
            drawn,
            drafts,
            batch.cu_num_logits,
            self.state.tree_of[batch.idx_mapping],
            self.state.bank.parents,
            self.state.num_steps,
        )
        return paths, processed

    def _walk_by_depth(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        batch: InputBatch,
        requests_np: np.ndarray,
        by_rule_np: np.ndarray,
        kept: torch.Tensor,
    ) -> AcceptedPaths:
        """Walk the trees of some requests while drawing.

        Args:
            logits: [rows, V], of the whole batch.
            drafts: integers [rows], likewise.
            batch: the whole batch.
            requests_np: int64 [R], places in the batch of the requests to walk, on the host.
            by_rule_np: bool [B], which requests of the batch the rule is for, on the host.
            kept: [rows, V], is given the logits that tokens were drawn from, for logprobs.
        """
        state = self.state
        requests = async_tensor_h2d(requests_np, device=logits.device)
        index, index_np = batch.idx_mapping[requests], batch.idx_mapping_np[requests_np]
        first_rows = batch.cu_num_logits[requests].long()
        sizes = batch.cu_num_logits[requests + 1] - first_rows
        positions = batch.positions[batch.logits_indices]
        tokens_read = batch.input_ids[batch.logits_indices]
        no_offset = torch.zeros_like(index, dtype=torch.int32)
        longest = batch.seq_lens_cpu_upper_bound.numpy()[requests_np]
        wants_logprobs = self._wants_logprobs(batch)
        text = _TextAhead(self.sampler, index)
        by_rule_np = by_rule_np[requests_np]
        any_by_rule = by_rule_np.any()
        by_rule = async_tensor_h2d(by_rule_np, device=logits.device)

        def draw(tree_rows: torch.Tensor, active: torch.Tensor, step: int) -> torch.Tensor:
            rows = first_rows + tree_rows
            drawn, processed = self.sampler.sample(
                logits[rows],
                index,
                index,
                index_np,
                positions[rows],
                tokens_read[rows],
                no_offset,
                longest,
                return_logprobs=wants_logprobs,
            )
            if any_by_rule:
                children = self._children(drafts, index, tree_rows, first_rows, sizes)
                at = DrawnRows(drawn, processed, children, index, tree_rows, positions[rows])
                drawn = torch.where(by_rule, self.rule.choose(at), drawn)
            if wants_logprobs:
                # A request whose walk has ended is drawn again, with its last token in its text.
                kept[rows] = torch.where(active[:, None], processed.to(kept.dtype), kept[rows])
            text.append(drawn, active)
            return drawn

        nodes = torch.arange(state.bank.parents.shape[1], device=index.device)
        is_node = nodes + 1 < sizes[:, None]
        places = (first_rows[:, None] + 1 + nodes).clamp(max=logits.shape[0] - 1)
        paths = walk(
            draw,
            drafts[places].long().masked_fill(~is_node, NO_TOKEN),
            state.bank.parents[state.tree_of[index]],
            batch.seq_lens[requests] >= self.req_states.prefill_len.gpu[index],
            num_steps=state.num_steps,
        )
        text.take_back()
        return paths

    def _children(
        self,
        drafts: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        first_rows: torch.Tensor,
        sizes: torch.Tensor,
    ) -> torch.Tensor:
        """Tokens of the children of R rows, int64 [R, N], in the order of the tree; ``NO_TOKEN``
        elsewhere.

        Args:
            drafts: integers [rows], of the whole batch.
            slots: integers [R], of each row's request in the state.
            rows: int64 [R], in the request's tree.
            first_rows: int64 [R], where the request's rows begin in the batch.
            sizes: integers [R], how many rows the request has.
        """
        nodes = self.state.bank.children[self.state.tree_of[slots], rows]
        is_node = (nodes >= 0) & (nodes + 1 < sizes[:, None])
        places = torch.where(is_node, first_rows[:, None] + 1 + nodes, 0)
        return drafts[places].long().masked_fill(~is_node, NO_TOKEN)

    def _wants_logprobs(self, batch: InputBatch) -> bool:
        return self.sampler.get_logprobs_dims(batch.idx_mapping_np) is not None

    def _logprobs(
        self, logits: torch.Tensor, paths: AcceptedPaths, batch: InputBatch
    ) -> LogprobsTensors | None:
        """Logprobs of the tokens of each path, [B x steps, logprobs + 1]: of the best tokens, or of
        those that a request names (``logprob_token_ids``)."""
        dims = self.sampler.get_logprobs_dims(batch.idx_mapping_np)
        if dims is None:
            return None
        num_logprobs, num_token_ids = dims
        num_requests, num_steps = paths.rows.shape
        rows = batch.cu_num_logits[:-1].long()[:, None] + paths.rows
        return compute_topk_scores(
            logits[rows.flatten()],
            num_logprobs,
            paths.tokens.flatten().clamp(min=0),
            [request * num_steps for request in range(num_requests + 1)],
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.idx_mapping.repeat_interleave(num_steps),
            max_per_req_token_ids=num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )


class _TextAhead:
    """Adds a path's tokens to the state that vLLM's rules read, and takes them back out.

    vLLM itself adds them once they are final (``post_update``).
    """

    def __init__(self, sampler: Sampler, index: torch.Tensor) -> None:
        """``index``: int64 [B], slots of the batch's requests in the state."""
        self.index = index
        self.texts = sampler.req_states.all_token_ids.gpu
        self.lengths = sampler.req_states.total_len.gpu
        self.counts = sampler.penalties_state.output_bin_counts
        self.lengths_before = self.lengths[index]
        self.added: list[tuple[torch.Tensor, torch.Tensor]] = []

    def append(self, tokens: torch.Tensor, active: torch.Tensor) -> None:
        """Append a token, int64 [B], to the texts of active requests, bool [B]."""
        # The last token of a text that reaches max_model_len has no place, and no rule after it.
        place = self.lengths[self.index].long().clamp(max=self.texts.shape[1] - 1)
        old = self.texts[self.index, place]
        self.texts[self.index, place] = torch.where(active, tokens.to(old.dtype), old)
        grown = active.to(self.lengths.dtype)
        self.lengths[self.index] += grown
        self.counts[self.index, tokens] += grown
        self.added.append((tokens, grown))

    def take_back(self) -> None:
        """Lengths and counts as they were; what stands behind a text's end counts for nothing."""
        self.lengths[self.index] = self.lengths_before
        for tokens, grown in self.added:
            self.counts[self.index, tokens] -= grown
