"""An oracle in the drafter's place: hides the true continuation in varying branches of the tree.

Random heads guess nothing right, so nothing would be accepted and nothing tested. The oracle knows
what the target will say (from a run without speculation) and, at every step, writes a stretch of it
along a randomly chosen path of the tree; all other nodes get wrong tokens. So accepted paths have
every length from nothing to the whole depth, through all branches.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from tests.triton_interpreter import ENABLED as INTERPRETED


class Oracle:
    """Drafts from known continuations.

    Attributes:
        lengths: how often a path of each length was offered whole.
        branches: how often each node was the end of the offered path.
    """

    def __init__(self, continuations: Mapping[tuple[int, ...], list[int]], vocab: int) -> None:
        """``continuations``: prompt -> the tokens the target says after it."""
        self.continuations = continuations
        self.vocab = vocab
        self.random = random.Random(0)
        self.deck: list[tuple[int, ...]] = []
        self.lengths: Counter[int] = Counter()
        self.branches: Counter[tuple[int, ...]] = Counter()

    def draft(
        self, prompt: list[int], output: list[int], paths: list[tuple[int, ...]]
    ) -> list[int]:
        """Tokens of all nodes for one request."""
        known = self.continuations[tuple(prompt)]
        truth = known[len(output) :] if known[: len(output)] == output else []
        end = self.deal(paths, len(truth))
        self.lengths[len(end)] += 1
        self.branches[end] += 1
        tokens = []
        for path in paths:
            depth = len(path)
            right = truth[depth - 1] if depth <= len(truth) else -1
            if path == end[:depth]:
                tokens.append(right)
            else:
                wrong = self.random.randrange(self.vocab - 1)
                tokens.append(wrong if wrong < right or right < 0 else wrong + 1)
        return tokens

    def deal(self, paths: list[tuple[int, ...]], longest: int) -> tuple[int, ...]:
        """The end of the path to offer; every one comes up once before any comes up again."""
        fitting = [end for end in self.deck if len(end) <= longest]
        if not fitting:
            self.deck = [(), *paths]
            fitting = [end for end in self.deck if len(end) <= longest]
        end = self.random.choice(fitting)
        self.deck.remove(end)
        return end


@contextmanager
def oracle_drafts(oracle: Oracle) -> Iterator[Oracle]:
    """Let the oracle fill the trees of every runner in this process."""
    with pytest.MonkeyPatch.context() as patch:
        (_patch_v2 if INTERPRETED else _patch_v1)(oracle, patch)
        yield oracle


def _patch_v1(oracle: Oracle, patch: pytest.MonkeyPatch) -> None:
    from vllm_medusa.runner.v1 import MedusaCPUModelRunner

    original = MedusaCPUModelRunner.propose_draft_token_ids

    def propose(self, scheduler_output, sampled_token_ids, *args):
        drafts = original(self, scheduler_output, sampled_token_ids, *args)
        paths = list(self.drafter.tree.paths[: scheduler_output.num_spec_tokens_to_schedule])
        for index, tokens in enumerate(drafts):
            if tokens:
                request = self.requests[self.input_batch.req_ids[index]]
                # Embeddings are zeros to the oracle, as they are to vLLM's V2 runner.
                prompt = request.prompt_token_ids or [0] * request.num_prompt_tokens
                drafts[index] = oracle.draft(prompt, request.output_token_ids, paths)
        return drafts

    patch.setattr(MedusaCPUModelRunner, "propose_draft_token_ids", propose)


def _patch_v2(oracle: Oracle, patch: pytest.MonkeyPatch) -> None:
    from vllm_medusa.runner.speculator import MedusaSpeculator
    from vllm_medusa.runner.v2 import TreeModelRunner

    original, sample_tokens = MedusaSpeculator.propose, TreeModelRunner.sample_tokens
    texts = None

    def watched_sample_tokens(self, *args, **kwargs):
        nonlocal texts
        texts = self.req_states
        return sample_tokens(self, *args, **kwargs)

    def propose(self, input_batch, *args, **kwargs):
        drafts = original(self, input_batch, *args, **kwargs)
        num_sampled = args[4].tolist()
        paths = list(self.drafter.tree.paths[: kwargs["num_speculative_tokens"]])
        for index, slot in enumerate(input_batch.idx_mapping_np):
            if num_sampled[index] and paths:
                text = texts.all_token_ids.gpu[slot, : texts.total_len.gpu[slot]].tolist()
                length = int(texts.prompt_len.np[slot])
                tokens = oracle.draft(text[:length], text[length:], paths)
                drafts[index, : len(paths)] = torch.tensor(tokens)
        return drafts

    patch.setattr(TreeModelRunner, "sample_tokens", watched_sample_tokens)
    patch.setattr(MedusaSpeculator, "propose", propose)
