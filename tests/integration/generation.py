"""Running an engine on prompts of token ids, with and without speculation."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from vllm import LLM, RequestOutput, SamplingParams

from tests.triton_interpreter import ENABLED as INTERPRETED
from vllm_medusa.bank import TreeBank
from vllm_medusa.calibration.live import model_runner

# The shape of the original Medusa's trees: 63 nodes, 10 of them at depth 1, four deep.
BUSHY = [
    *[[r] for r in range(10)],
    *[[0, r] for r in range(8)],
    *[[1, r] for r in range(5)],
    *[[2, r] for r in range(4)],
    *[[r, 0] for r in range(3, 8)],
    *[[0, 0, r] for r in range(8)],
    *[[0, 1, r] for r in range(4)],
    *[[1, 0, r] for r in range(4)],
    *[[2, 0, r] for r in range(2)],
    [1, 1, 0], [2, 1, 0],
    *[[0, 0, 0, r] for r in range(5)],
    *[[0, 1, 0, r] for r in range(2)],
    *[[1, 0, 0, r] for r in range(2)],
    [2, 0, 0, 0], [1, 1, 0, 0],
]  # fmt: skip

# Small enough to be quick, with branches at every depth down to 5.
SMALL_BUSHY = [
    [0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0],
    [2, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0, 0],
]  # fmt: skip

TREES: dict[str, object] = {
    "chain4": [[0] * depth for depth in range(1, 5)],
    "chain7": [[0] * depth for depth in range(1, 8)],
    "chain15": [[0] * depth for depth in range(1, 16)],
    "chain63": [[0] * depth for depth in range(1, 64)],
    "star": [[rank] for rank in range(12)],
    "bushy63": BUSHY,
    "one": [[0]],
    "full127": [[0] * depth for depth in range(1, 9)]
    + [[0] * depth + [rank] for depth in range(8) for rank in range(1, 16)][:119],
}


def fewer(number: int, at_least: int = 4) -> int:
    """A number of prompts or tokens; in Triton's interpreter a third of it."""
    return max(number // 3, at_least) if INTERPRETED else number


def some(cases: list[Any]) -> list[Any]:
    """The cases of a test; in Triton's interpreter the last one, which is the hardest."""
    return cases[-1:] if INTERPRETED else cases


def make_prompts(
    number: int, vocab: int, *, longest: int = 120, prefix: int = 0, seed: int = 0
) -> list[list[int]]:
    """Random prompts of different lengths, ``prefix`` first tokens shared by all."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(3, vocab) for _ in range(prefix)]
    return [
        shared + [numbers.randrange(3, vocab) for _ in range(numbers.randint(1, longest))]
        for _ in range(number)
    ]


def sampling_params(**params: object) -> SamplingParams:
    """Greedy, 100 tokens, past the end-of-sequence token, unless told otherwise."""
    defaults: dict[str, object] = {
        "temperature": 0.0,
        "max_tokens": fewer(100),
        "ignore_eos": True,
        "detokenize": False,
    }
    return SamplingParams(**defaults | params)  # type: ignore[arg-type]


def generate(
    llm: LLM,
    prompts: Sequence[list[int]],
    each: Iterable[Mapping[str, object]] | None = None,
    **params: object,
) -> list[RequestOutput]:
    """All prompts in one batch.

    Args:
        llm: the engine.
        prompts: token ids.
        each: sampling parameters of each prompt, besides those for all.
        params: sampling parameters of all prompts.
    """
    own: Iterable[Mapping[str, object]] = [{}] * len(prompts) if each is None else each
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [sampling_params(**{**params, **mine}) for mine in own],
        use_tqdm=False,
    )


def step_through(
    llm: LLM,
    arrivals: Mapping[int, Mapping[str, list[int]]],
    aborts: Mapping[int, list[str]],
    each: Mapping[str, Mapping[str, object]] | None = None,
    **params: object,
) -> dict[str, RequestOutput]:
    """Run an engine step by step.

    Args:
        llm: the engine.
        arrivals: step -> the prompts that arrive before it, by name.
        aborts: step -> names of the requests that are aborted before it.
        each: sampling parameters of each request by name, besides those for all.
        params: sampling parameters of all requests.

    Returns:
        The last that each request had said, by name; nothing of those that said nothing.
    """
    engine, said, step = llm.llm_engine, {}, 0
    while engine.has_unfinished_requests() or step <= max(arrivals):
        for name, prompt in arrivals.get(step, {}).items():
            own = sampling_params(**{**params, **(each or {}).get(name, {})})
            engine.add_request(name, {"prompt_token_ids": prompt}, own)
        engine.abort_request(aborts.get(step, []))
        for output in engine.step():
            said[output.request_id] = output
        step += 1
    return said


def tokens(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    """The generated token ids of each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def endings(outputs: Iterable[RequestOutput]) -> list[tuple[str | None, int | str | None]]:
    """Why each request ended, and the token that stopped it."""
    return [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs]


def assert_logprobs_agree(found: Any, expected: Any) -> None:
    """The logprobs of a text's tokens, or a prompt's, are the same within 1e-3, and the ranks."""
    if expected is None:
        assert found is None
        return
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        if there is None:  # the first token of a prompt
            assert here is None
            continue
        assert set(here) == set(there)
        for token, value in there.items():
            assert here[token].logprob == pytest.approx(value.logprob, abs=1e-3)
            # Tokens this close may change places.
            close = [other for other in there.values() if abs(other.logprob - value.logprob) < 1e-4]
            if len(close) == 1:
                assert here[token].rank == value.rank


def assert_empty(llm: LLM) -> None:
    """No request and no block is left behind."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is never given out


def printable(text: Iterable[int]) -> list[str]:
    """The characters of a text, as the tokenizers of ``tiny`` have them."""
    return [chr(token) for token in text if 32 < token < 127]


def to_come(
    each: Sequence[Mapping[str, object]],
    texts: Sequence[list[int]],
    expected: Iterable[RequestOutput],
) -> list[list[int]]:
    """What the oracle is to say to requests with rules: what they say, and ``texts``, which they
    say without rules, where a stop string only ends a text. Its tokens may go on behind it, up to
    the step's last one."""
    return [
        text if "stop" in own else said
        for own, text, said in zip(each, texts, tokens(expected), strict=True)
    ]


def continuations(
    prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> dict[tuple[int, ...], list[int]]:
    """What the oracle is to know: prompt -> the tokens that the target says after it."""
    return {tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)}


def medusa(heads: object, tree: object, **options: object) -> dict[str, object]:
    """Engine arguments that ask for Medusa; all drafts are the heads' (or the oracle's), unless
    ``lookup`` is asked for."""
    config = {"method": "medusa", "model": str(heads), "tree": tree, "lookup": False, **options}
    return {"speculative_config": config}


def runner_of(llm: LLM) -> Any:
    """The model runner of an engine in this process."""
    return model_runner(llm)


def bank_of(llm: LLM) -> TreeBank:
    """The trees of an engine in this process."""
    runner = runner_of(llm)
    return runner.model_state.bank if INTERPRETED else runner.bank
