"""Requests whose text is certain whatever is drawn: rules of acceptance may not change them."""

from collections.abc import Mapping
from typing import Any

from vllm import LLM, RequestOutput

from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_tokenizer
from tests.integration.watch import Watch, watching
from tests.triton_interpreter import ENABLED as INTERPRETED

# With top-k 1 one token has all of the probability.
CERTAIN: list[Mapping[str, object]] = (1 if INTERPRETED else 3) * [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1, "presence_penalty": 1.5},
    {"temperature": 0.7, "top_k": 1, "logprobs": 3},
    {"temperature": 1.0, "top_p": 1e-6, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 1, "min_tokens": 20, "stop_token_ids": list(range(0, VOCAB, 5))},
    {"temperature": 1.0, "top_k": 1, "allowed_token_ids": list(range(3, VOCAB, 4))},
    {"temperature": 1.0, "top_k": 1, "bad_words": ["a", "bc", "%"]},
    {"temperature": 0.0, "frequency_penalty": 0.5},
]


def plain_and_medusa(models: Any, heads: Any, start: Any, **config: object) -> list[LLM]:
    """Engines with a tokenizer: without trees, and with them; what they are started with are
    fixtures, ``start`` is ``module_engine``."""
    model = add_tokenizer(models("llama", pad_token_id=0))
    trees = medusa(heads(max(map(len, SMALL_BUSHY))), SMALL_BUSHY, **config)
    return [start(model, skip_tokenizer_init=False, **options) for options in ({}, trees)]


def generate_certain(
    plain: LLM, llm: LLM
) -> tuple[list[RequestOutput], list[RequestOutput], Watch]:
    """Generate without and with trees, in which the right drafts stand among many wrong ones.

    Returns what was said without, what with, and what the scheduler did with the trees.
    """
    prompts = make_prompts(len(CERTAIN), VOCAB, seed=31)
    length = fewer(40, 24)  # one request has 20 tokens at least
    expected = generate(plain, prompts, CERTAIN, max_tokens=length)
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate(llm, prompts, CERTAIN, max_tokens=length)
    return expected, outputs, watch


def differences(
    expected: list[RequestOutput], outputs: list[RequestOutput]
) -> list[Mapping[str, object]]:
    """The requests that were answered otherwise: in tokens, ends, or ranks of logprobs."""
    found = []
    for own, should, output in zip(CERTAIN, expected, outputs, strict=True):
        here, there = (each.outputs[0] for each in (output, should))
        is_same = (here.token_ids, here.finish_reason) == (there.token_ids, there.finish_reason)
        if not is_same or ranks(here.logprobs) != ranks(there.logprobs):
            found.append(own)
    return found


def ranks(logprobs: list[Mapping[int, object]] | None) -> list[dict[int, int]]:
    """Token -> rank, at every place."""
    return [{token: value.rank for token, value in place.items()} for place in logprobs or []]
