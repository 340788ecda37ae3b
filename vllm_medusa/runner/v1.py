"""Adapter to vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``), as the CPU uses it.

In the order of a step: the drafts of the last step arrive as scheduled tokens with linear slots and
positions; before the forward pass the positions become depth positions and the attention metadata
learns of the trees; after it the trees are walked with tokens drawn by vLLM's own sampler, the
accepted path is compacted, and the next trees are drafted.
"""

import functools
from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_medusa.acceptance import NO_LIMIT, NO_TOKEN, AcceptedPaths, walk
from vllm_medusa.agreement import decide_once
from vllm_medusa.attention.backends import CPUSlotMover, tree_attention
from vllm_medusa.attention.cpu import TreeCPUAttentionMetadataBuilder
from vllm_medusa.attention.layers import check_attention_layers, check_one_group
from vllm_medusa.bank import TreeBank
from vllm_medusa.drafter import MedusaDrafter
from vllm_medusa.drafts import TreeDraftTokenIds
from vllm_medusa.lookup import lookup
from vllm_medusa.runner.draft_sampler import DraftSampler, build_draft_sampler
from vllm_medusa.sampled_drafts import DraftProbs, DraftSampling, draws_drafts, exponential
from vllm_medusa.tree import TokenTree
from vllm_medusa.without_trees import reason_without_trees

# Places in the bank.
HEADS_TREE, LOOKUP_CHAIN = 0, 1


class MedusaCPUModelRunner(CPUModelRunner):
    """vLLM's CPU model runner with token trees."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        stock = gpu_model_runner.build_logitsprocs
        gpu_model_runner.build_logitsprocs = _builtin_logitsprocs
        try:
            super().__init__(vllm_config, device)
        finally:
            gpu_model_runner.build_logitsprocs = stock
        # vLLM's runner has built its own Medusa proposer, which holds no weights yet.
        self.drafter = MedusaDrafter(vllm_config, device)
        config, tree = self.drafter.config, self.drafter.tree
        # Where the rule of acceptance looks at the drafts, the last step of vLLM's sampler is ours.
        self.draft_sampler = build_draft_sampler(config, self.sampler.topk_topp_sampler)
        if self.draft_sampler is not None:
            self.sampler.topk_topp_sampler = self.draft_sampler
        # What a request's newest drafts were drawn from, where they were drawn, by row.
        self.drawn_from: dict[str, DraftProbs] = {}
        self.bank = TreeBank([tree, TokenTree.chain(len(tree))], device)
        # Which tree of the bank a request's newest drafts form; HEADS_TREE where it is not here.
        self.tree_of: dict[str, int] = {}
        # vLLM stops drafting for the whole batch when one request nears the drafter's longest
        # sequence. Heads have none; the scheduler cuts each request's tree at max_model_len.
        self.effective_drafter_max_model_len = NO_LIMIT
        # Row (of this step's logits) at the end of each request's path, int64 [requests].
        self.last_rows: torch.Tensor | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        with tree_attention(self.vllm_config):
            super().load_model(load_dummy_weights)
        check_attention_layers(self.compilation_config.static_forward_context)

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        check_one_group(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        self.mover = CPUSlotMover(self.kv_caches)

    # -- before the forward pass -------------------------------------------------------------------

    def _build_attention_metadata(self, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        # vLLM counts, per request, the drafts of this step: -1 where a prompt chunk is read.
        num_nodes = self.num_decode_draft_tokens.cpu[:num_reqs]
        any_tree = kwargs.get("use_spec_decode", False) and bool((num_nodes > 0).any())
        trees = self._trees(num_reqs) if any_tree else None
        tree_index = None
        if trees is not None:
            tree_index = torch.where(num_nodes >= 0, trees, -1).to(torch.int32)
            self._set_depth_positions(num_nodes, trees, num_tokens)
        for builder in self._tree_builders():
            builder.set_trees(tree_index, self.bank.ancestors)
        return super()._build_attention_metadata(num_tokens, num_reqs, *args, **kwargs)

    def _tree_builders(self):  # type: ignore[no-untyped-def]
        for group in self._attn_group_iterator():
            builder = group.get_metadata_builder()
            assert isinstance(builder, TreeCPUAttentionMetadataBuilder)
            yield builder

    def _trees(self, num_reqs: int) -> torch.Tensor:
        """Which tree of the bank each request of the batch has, int64 [requests]."""
        names = self.input_batch.req_ids[:num_reqs]
        return torch.tensor([self.tree_of.get(name, HEADS_TREE) for name in names])

    def _set_depth_positions(
        self, num_nodes: torch.Tensor, trees: torch.Tensor, num_tokens: int
    ) -> None:
        """Node positions: linear as vLLM's slots (computed already), by depth for the rotary
        embedding.

        In place: ``positions`` is the buffer that the forward pass reads.
        """
        rows = self.query_pos.cpu[:num_tokens].long()
        requests = self.req_indices.cpu[:num_tokens].long()
        last = self.bank.depth_offset.shape[1] - 1
        offset = self.bank.depth_offset[trees[requests], rows.clamp(max=last)]
        self.positions[:num_tokens] += offset * (num_nodes > 0)[requests]

    # -- acceptance and compaction -----------------------------------------------------------------

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        assert logits is not None and spec_decode_metadata is not None
        num_nodes = torch.tensor(spec_decode_metadata.num_draft_tokens)
        first_rows = spec_decode_metadata.cu_num_sampled_tokens.long() - num_nodes - 1
        draft_tokens = _pad_drafts(spec_decode_metadata.draft_token_ids, num_nodes)
        num_reqs, width = draft_tokens.shape
        active = torch.from_numpy(~self.discard_request_mask.np[:num_reqs])
        if (holder := self.input_batch.thinking_budget_state_holder) is not None:
            # With speculation it expects a row per draft; the walk hands it one row per request.
            holder.in_spec_mode = False
        trees = self._trees(num_reqs)
        parents = self.bank.parents[trees, :width]
        target = _Target(self, logits, first_rows, draft_tokens, trees)
        paths = decide_once(
            lambda: walk(target.draw, draft_tokens, parents, active, target.max_steps()),
            num_reqs,
            width + 1,
            self.device,
        )
        target.close()
        self.last_rows = first_rows + paths.last_rows
        self._compact(paths, num_nodes)
        return SamplerOutput(
            sampled_token_ids=paths.tokens.to(torch.int32),
            logprobs_tensors=target.logprobs(num_steps=paths.tokens.shape[1]),
        )

    def _compact(self, paths: AcceptedPaths, num_nodes: torch.Tensor) -> None:
        # The rows of a tree are the last ones of its request.
        ends = self.query_start_loc.cpu[1 : num_nodes.shape[0] + 1].long()
        slots = self.input_batch.block_table[0].slot_mapping.gpu
        self.mover.move(paths, slots, ends - num_nodes - 1)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        # vLLM rewinds the generators of requests whose token is discarded, which fails on CPUs
        # ("CPU Generator does not use offset"). The walk draws nothing for them: there is nothing
        # to rewind.
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators = generators

    # -- drafting ----------------------------------------------------------------------------------

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: SamplingMetadata,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        *unused: Any,
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        num_nodes = scheduler_output.num_spec_tokens_to_schedule
        if not num_nodes:  # by the batch-size schedule
            return drafts
        requests = [
            index
            for index, tokens in enumerate(sampled_token_ids)
            if tokens and self._can_speculate(index)
        ]
        repeating = self._lookup(requests, num_nodes)
        self._remember_trees(requests, repeating)
        for index, tokens in repeating.items():
            drafts[index] = tokens
        requests = [index for index in requests if index not in repeating]
        method = self.drafter.config.draft_sample_method
        drawing = [index for index in requests if draws_drafts(method, self._params(index))]
        best = [index for index in requests if index not in drawing]
        for chosen, propose in ((best, self._best_drafts), (drawing, self._drawn_drafts)):
            if chosen:
                assert self.last_rows is not None
                states = sample_hidden_states[self.last_rows[chosen]]
                roots = torch.tensor([sampled_token_ids[index][-1] for index in chosen])
                proposed = propose(chosen, states, roots, num_nodes).tolist()
                for index, tokens in zip(chosen, proposed, strict=True):
                    drafts[index] = tokens
        return drafts

    def _best_drafts(
        self, requests: list[int], states: torch.Tensor, roots: torch.Tensor, num_nodes: int
    ) -> torch.Tensor:
        return self.drafter.propose(states, roots, num_nodes)

    def _drawn_drafts(
        self, requests: list[int], states: torch.Tensor, roots: torch.Tensor, num_nodes: int
    ) -> torch.Tensor:
        asked = [self._params(index) for index in requests]
        sampling = DraftSampling(
            torch.tensor([params.temperature for params in asked]),
            # vLLM says "all" with 0 or -1.
            torch.tensor([params.top_k if params.top_k > 0 else NO_LIMIT for params in asked]),
            torch.tensor([params.top_p for params in asked]),
        )
        generators = self.input_batch.generators
        own = {row: generators[index] for row, index in enumerate(requests) if index in generators}

        def noise(depth: int, shape: tuple[int, ...]) -> torch.Tensor:
            return exponential(shape, own, self.device)

        tokens, drawn_from = self.drafter.propose_drawn(states, roots, num_nodes, sampling, noise)
        for row, index in enumerate(requests):
            name = self.input_batch.req_ids[index]
            self.drawn_from[name] = DraftProbs(*(values[row] for values in drawn_from))
        return tokens

    def _lookup(self, requests: list[int], num_nodes: int) -> dict[int, list[int]]:
        """The requests whose text repeats itself, and what came next before."""
        if not self.drafter.config.lookup:
            return {}
        found = {index: lookup(self._known_text(index), num_nodes) for index in requests}
        return {index: tokens for index, tokens in found.items() if tokens}

    def _known_text(self, index: int) -> NDArray[np.int32]:
        """A request's tokens so far. A prompt with embeddings is left out: where they stand, the
        batch holds what another request has left there."""
        batch = self.input_batch
        has_embeddings = index in batch.req_prompt_embeds
        first = batch.num_prompt_tokens[index] if has_embeddings else 0
        return batch.token_ids_cpu[index, first : batch.num_tokens_no_spec[index]]

    def _remember_trees(self, requests: list[int], repeating: Container[int]) -> None:
        """Note the new drafts' trees, and forget what the drafts before were drawn from; what is
        known of requests that wait with older drafts stays."""
        names = self.input_batch.req_ids
        new = {names[i]: LOOKUP_CHAIN if i in repeating else HEADS_TREE for i in requests}
        kept = {name: tree for name, tree in self.tree_of.items() if name in self.requests}
        self.tree_of = kept | new
        self.drawn_from = {
            name: probs
            for name, probs in self.drawn_from.items()
            if name in self.requests and name not in new
        }

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        are_chain = [self.tree_of.get(name) == LOOKUP_CHAIN for name in drafts.req_ids]
        return TreeDraftTokenIds(drafts.req_ids, drafts.draft_token_ids, are_chain)

    def _can_speculate(self, index: int) -> bool:
        """Whether the request's rules can be followed along a path; if not it is served without
        trees."""
        return reason_without_trees(self._params(index), self.vllm_config) is None

    def _params(self, index: int) -> SamplingParams:
        return self.requests[self.input_batch.req_ids[index]].sampling_params


class _Target:
    """Draws tokens from the target for the walk, exactly as vLLM would at that place.

    Greedy requests without further rules take one argmax over all rows. While others are on their
    way, each step runs vLLM's own sampler on one row per request, with the path's tokens appended
    to the request's output, so that every rule (penalties, bias, masks, top-k, top-p, min-p, seeds,
    logprobs) sees what it would see without speculation.
    """

    def __init__(
        self,
        runner: MedusaCPUModelRunner,
        logits: torch.Tensor,
        first_rows: torch.Tensor,
        draft_tokens: torch.Tensor,
        trees: torch.Tensor,
    ) -> None:
        """``draft_tokens``: as the walk takes them; ``trees``: int64 [B], in the bank."""
        self.runner = runner
        self.logits = logits
        self.first_rows = first_rows
        self.draft_tokens = draft_tokens
        self.trees = trees
        self.metadata = runner.input_batch.sampling_metadata
        self.needs_sampler = None
        if not _is_plain(self.metadata):
            requests = [runner.requests[name] for name in runner.input_batch.req_ids]
            self.needs_sampler = torch.tensor(
                [_needs_sampler(request.sampling_params) for request in requests]
            )
        self.outputs = runner.input_batch.req_output_token_ids
        self.appended: list[list[int]] = []
        self.steps: list[LogprobsTensors] = []

    @functools.cached_property
    def greedy(self) -> torch.Tensor:
        """The greedy token of every row; in float32, as the sampler does it."""
        return self.runner.sampler.greedy_sample(self.logits.to(torch.float32))

    def max_steps(self) -> torch.Tensor | None:
        """How many tokens each request may draw in this step; None: no limits."""
        limits = {}
        for processor in self.metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, MinTokensLogitsProcessor):
                # Stop tokens are masked as of this step's start; that holds until min_tokens is
                # met.
                for index, (min_tokens, output, *_) in processor.min_toks.items():
                    limits[index] = min_tokens - len(output)
        if not limits:
            return None
        steps = torch.full_like(self.first_rows, NO_LIMIT)
        steps[list(limits)] = torch.tensor(list(limits.values()))
        return steps

    def draw(self, rows: torch.Tensor, active: torch.Tensor, step: int) -> torch.Tensor:
        """Draw one token per request at ``rows``; see ``acceptance.walk``."""
        tree_rows, rows = rows, self.first_rows + rows
        # The first token of all requests comes from the sampler, as vLLM does it; later ones only
        # while a request is on its way that is more than plain greedy.
        if self.needs_sampler is None or (step > 0 and not (self.needs_sampler & active).any()):
            return self.greedy[rows]
        if self.runner.draft_sampler is not None:
            self._show_drafts(self.runner.draft_sampler, tree_rows, active)
        is_active = active.tolist()
        metadata = replace(
            self.metadata,
            # A request's own random numbers are used for tokens that it keeps, and no others.
            generators={i: gen for i, gen in self.metadata.generators.items() if is_active[i]},
            thinking_budget_state_holder=(
                self.metadata.thinking_budget_state_holder if step == 0 else None
            ),
            spec_token_ids=None,  # the path's tokens are in the outputs already
        )
        output = self.runner.sampler(logits=self.logits[rows], sampling_metadata=metadata)
        tokens = output.sampled_token_ids[:, 0].long()
        if output.logprobs_tensors is not None:
            self.steps.append(output.logprobs_tensors)
        for index, token in enumerate(tokens.tolist()):
            if is_active[index] and self.outputs[index] is not None:
                self.outputs[index].append(token)
                self.appended.append(self.outputs[index])
        return tokens

    def _show_drafts(self, sampler: DraftSampler, rows: torch.Tensor, active: torch.Tensor) -> None:
        """Tell a sampler that looks at drafts of those at ``rows``."""
        nodes = self.runner.bank.children[self.trees, rows]
        width = self.draft_tokens.shape[1]
        is_node = (nodes >= 0) & (nodes < width)
        padded = nn.functional.pad(self.draft_tokens, (0, 1), value=NO_TOKEN)
        children = padded.gather(1, torch.where(is_node, nodes, width))
        has_drafts = (active & (children != NO_TOKEN).any(dim=1)).tolist()
        names = self.runner.input_batch.req_ids
        drawn_from = [self.runner.drawn_from.get(name) for name in names]
        sampler.children = children
        sampler.draft_probs = {
            index: DraftProbs(own.probs[row], own.token_ids[row])
            for index, (own, row) in enumerate(zip(drawn_from, rows.tolist(), strict=True))
            if own is not None and has_drafts[index]
        }

    def close(self) -> None:
        """Take the path's tokens back out; vLLM's bookkeeping appends them once they are final."""
        for output in self.appended:
            output.pop()
        self.appended.clear()
        if self.runner.draft_sampler is not None:
            self.runner.draft_sampler.forget()

    def logprobs(self, num_steps: int) -> LogprobsTensors | None:
        """Logprobs of the drawn tokens, [requests * steps, logprobs + 1], in vLLM's flat order."""
        if not self.steps:
            return None
        # Steps without the sampler hold no token of a request that asks for logprobs.
        steps = self.steps + self.steps[-1:] * (num_steps - len(self.steps))
        return LogprobsTensors(
            *(
                torch.stack([step[field] for step in steps], dim=1).flatten(0, 1)
                for field in range(3)
            )
        )


def _builtin_logitsprocs(
    vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool, *unused: Any
) -> LogitsProcessors:
    """All of vLLM's own logits processors.

    With speculation vLLM leaves out min-p and logit bias, which its rejection sampler cannot apply;
    the walk can, as it runs vLLM's sampler. Custom processors stay refused (support.py).
    """
    return LogitsProcessors(
        processor(vllm_config, device, is_pin_memory) for processor in BUILTIN_LOGITS_PROCESSORS
    )


def _is_plain(metadata: SamplingMetadata) -> bool:
    """All requests greedy, and nothing that changes logits or asks for logprobs."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.all_greedy
        and metadata.no_penalties
        and not metadata.bad_words_token_ids
        and metadata.allowed_token_ids_mask is None
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and not (holder is not None and holder.has_tracked_requests())
        and not any(map(_is_in_use, metadata.logitsprocs.non_argmax_invariant))
    )


def _needs_sampler(params: Any) -> bool:
    """Whether a request is more than plain greedy, by what it asks for."""
    return not (
        params.sampling_type == SamplingType.GREEDY
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and params.logprobs is None
        and not params.logprob_token_ids
        and not params.logit_bias
        and not params.bad_words
        and params.allowed_token_ids is None
        and not params.min_tokens
        and not _has_budget(params)
    )


def _is_in_use(processor: object) -> bool:
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return not isinstance(processor, MinPLogitsProcessor)


def _has_budget(params: Any) -> bool:
    return getattr(params, "thinking_token_budget", None) is not None


def _pad_drafts(draft_tokens: torch.Tensor, num_nodes: torch.Tensor) -> torch.Tensor:
    """[all nodes] -> int64 [requests, most nodes], filled up with ``NO_TOKEN``."""
    columns = torch.arange(int(num_nodes.max()))
    padded = torch.full((num_nodes.shape[0], columns.shape[0]), NO_TOKEN)
    padded[columns < num_nodes[:, None]] = draft_tokens.long()
    return padded
