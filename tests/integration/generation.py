"""Running an engine on prompts of token ids, with and without speculation."""

import random

from vllm import LLM, RequestOutput, SamplingParams

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


def generate(llm: LLM, prompts: list[list[int]], **params: object) -> list[RequestOutput]:
    """All prompts in one batch; greedy unless told otherwise."""
    defaults: dict[str, object] = {
        "temperature": 0.0,
        "max_tokens": 100,
        "ignore_eos": True,
        "detokenize": False,
    }
    sampling = SamplingParams(**defaults | params)  # type: ignore[arg-type]
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """The generated token ids of each request."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def medusa(heads: object, tree: object, **options: object) -> dict[str, object]:
    """Engine arguments that ask for Medusa."""
    config = {"method": "medusa", "model": str(heads), "tree": tree, **options}
    return {"speculative_config": config}
