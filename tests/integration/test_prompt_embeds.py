"""Prompts given as embeddings, in whole or in part, beside prompts of token ids: text is that of
vLLM without speculation."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.v1.worker.gpu.model_states import default

from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    fewer,
    make_prompts,
    medusa,
    sampling_params,
    some,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.test_sequential import TREE, make_sequential_heads
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED
from vllm_medusa.drafter import MedusaDrafter

LENGTH = fewer(50, 14)
DEPTH = max(map(len, SMALL_BUSHY))
RULES = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "presence_penalty": 1.5},
    {"temperature": 0.7, "frequency_penalty": 1.1, "logprobs": 2},
    {"temperature": 1.0, "top_k": 12, "min_p": 0.02},
]


@pytest.fixture(scope="module")
def table(models):
    """The target's embeddings of tokens."""
    target = AutoModelForCausalLM.from_pretrained(models())
    return target.get_input_embeddings().weight.detach()


@pytest.fixture(scope="module")
def prompts(table):
    """Prompts by kind, and what the oracle knows each of them by: token ids, with zeros for
    embeddings. So those with embeddings are of different lengths."""
    numbers = torch.Generator().manual_seed(5)
    lengths = iter(range(21, 200, 7))

    def random_tokens():
        return torch.randint(3, VOCAB, (next(lengths),), generator=numbers)

    made = []
    for _ in range(fewer(4, 3)):
        ids = random_tokens()
        made.append(("tokens", {"prompt_token_ids": ids.tolist()}, ids.tolist()))
        # The embeddings of tokens: what it says to those is known.
        ids = random_tokens()
        made.append(("embedded tokens", {"prompt_embeds": table[ids]}, [0] * len(ids)))
        # What no tokens give: between one token and the next.
        ids = random_tokens()
        between = (table[ids] + table[ids.roll(1)]) / 2
        made.append(("embeddings", {"prompt_embeds": between}, [0] * len(ids)))
        # A stretch of embeddings amid tokens, as in a chat.
        ids = random_tokens()
        is_token = torch.ones(len(ids), dtype=torch.bool)
        is_token[len(ids) // 4 : len(ids) // 2] = False
        ids[~is_token] = 0
        embeds = torch.where(is_token[:, None], 0, table.mean(0) + table[5 : 5 + len(ids)])
        mixed = {
            "prompt_embeds": embeds,
            "prompt_token_ids": ids.tolist(),
            "prompt_is_token_ids": is_token.tolist(),
        }
        made.append(("both", mixed, ids.tolist()))
    return made


def generate(llm, prompts, rules):
    params = [
        sampling_params(**{"max_tokens": LENGTH, "seed": number, **own})
        for number, own in enumerate(rules)
    ]
    return llm.generate([dict(prompt) for _, prompt, _ in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(plain_engine, models, prompts):
    """What vLLM says without speculation."""
    rules = [own for _, own in zip(prompts, itertools.cycle(RULES), strict=False)]
    llm = plain_engine(models(), enable_prompt_embeds=True)
    return rules, generate(llm, prompts, rules)


@pytest.mark.parametrize(
    "options",
    some([
        {},
        {"enable_prefix_caching": True, "block_size": 32},
        # Pieces of prompts beside trees; requests that are preempted and read again.
        {"max_num_batched_tokens": 70, "max_num_seqs": 8, "block_size": 32,
         "num_gpu_blocks_override": 12, "max_model_len": 256},
    ]),
    ids=some(["whole", "prefix caching", "pieces and preemptions"]),
)  # fmt: skip
def test_beside_tokens(options, prompts, expected, models, heads, module_engine):
    rules, wanted = expected
    llm = module_engine(
        models(), **medusa(heads(DEPTH), SMALL_BUSHY), enable_prompt_embeds=True, **options
    )
    known = continuations([key for *_, key in prompts], tokens(wanted))
    cached = "enable_prefix_caching" in options
    for repetition in range(1 + cached):
        with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
            outputs = generate(llm, prompts, rules)
        assert tokens(outputs) == tokens(wanted)
        longest = {kind: 0 for kind, *_ in prompts}
        for (kind, *_), output in zip(prompts, outputs, strict=True):
            longest[kind] = max(longest[kind], watch.longest(output))
            if repetition:
                assert output.num_cached_tokens >= (len(output.prompt_token_ids) - 1) // 32 * 32
        assert min(longest.values()) > 2
    if "num_gpu_blocks_override" in options:
        assert watch.met("chunk", "tree")
        assert watch.preemptions > 0


def test_embedded_tokens_are_as_good_as_tokens(prompts, plain_engine, models, table):
    """Of vLLM itself, so that the tests here mean something."""
    llm = plain_engine(models(), enable_prompt_embeds=True)
    chosen = [item for item in prompts if item[0] == "embedded tokens"]
    ids = [torch.cdist(item[1]["prompt_embeds"], table).argmin(dim=1).tolist() for item in chosen]
    as_tokens = [("tokens", {"prompt_token_ids": own}, own) for own in ids]
    greedy = [{"temperature": 0.0}] * len(chosen)
    assert tokens(generate(llm, chosen, greedy)) == tokens(generate(llm, as_tokens, greedy))


def test_drafts_are_those_of_the_tokens(prompts, table, models, engine, tmp_path, monkeypatch):
    """Heads that read the tokens of a path get them embedded, whatever the prompt was given as."""
    folder = make_sequential_heads(tmp_path / "heads")
    llm = engine(models(), **medusa(folder, TREE), enable_prompt_embeds=True)
    propose, drafts = MedusaDrafter.propose, []

    def watched(self, *args):
        drafts.append(propose(self, *args))
        return drafts[-1]

    monkeypatch.setattr(MedusaDrafter, "propose", watched)
    ids = make_prompts(3, VOCAB, longest=30, seed=61)
    found = []
    for given in (
        [("", {"prompt_token_ids": own}, own) for own in ids],
        [("", {"prompt_embeds": table[own]}, own) for own in ids],
    ):
        drafts.clear()
        texts = tokens(generate(llm, given, [{"temperature": 0.0}] * 3))
        found.append((texts, [draft.tolist() for draft in drafts]))
    assert found[0][1]
    assert found[0] == found[1]


@pytest.mark.v1_only(reason="the V2 runner drafts without lookup")
def test_lookup_leaves_embeddings_out(prompts, expected, models, heads, engine, monkeypatch):
    """What stands in their place among the batch's token ids is none of the request's."""
    from vllm_medusa.runner import v1

    looked_up = []

    def watched(text, num_tokens):
        looked_up.append(text.tolist())
        return []

    monkeypatch.setattr(v1, "lookup", watched)
    llm = engine(
        models(), **medusa(heads(3), SMALL_BUSHY[:4], lookup=True), enable_prompt_embeds=True
    )
    rules, wanted = expected
    outputs = generate(llm, prompts, rules)
    assert tokens(outputs) == tokens(wanted)
    texts = [
        (prompt["prompt_token_ids"] if kind == "tokens" else []) + text
        for (kind, prompt, _), text in zip(prompts, tokens(wanted), strict=True)
    ]
    assert looked_up
    assert all(any(text[: len(seen)] == seen for text in texts) for seen in looked_up)


@pytest.mark.skipif(not INTERPRETED, reason="what only vLLM's V2 runner asks")
def test_a_target_that_would_ignore_them_is_refused(models, engine, heads, monkeypatch):
    """In vLLM's own words, which stand in the function that ours replaces."""
    monkeypatch.setattr(default.DefaultModelState, "supports_prompt_embeds", False)
    with pytest.raises(ValueError, match="--enable-prompt-embeds not supported with Default"):
        engine(models(), **medusa(heads(3), TREE[:4]), enable_prompt_embeds=True)
