"""Long traffic: memory grows no more than without Medusa, and the engine holds nothing in the end.

``make soak`` serves as many requests as the demo's server does in four hours, and writes
docs/soak.md.
"""

import ctypes
import gc
import json
import os
import random
from pathlib import Path

import psutil
import pytest
from vllm import SamplingParams

from tests.integration.generation import assert_empty, make_prompts, medusa
from tests.integration.test_matrix import ROWS
from tests.integration.tiny import (
    VOCAB,
    add_byte_tokenizer,
    idle_heads,
    make_repeating_model,
    save_heads,
)
from vllm_medusa.machine import describe_machine

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "600"))
REPORT = os.environ.get("SOAK_REPORT")
ASCII = 127
AT_ONCE = 10  # requests
TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [3]]
NUM_SAMPLES = 20


@pytest.fixture(scope="module")
def start(tmp_path_factory, module_engine):
    """Start an engine with prefix caching and too few blocks for everybody; with trees, drafts are
    often right."""
    model = add_byte_tokenizer(make_repeating_model(tmp_path_factory.mktemp("repeats")))
    heads = save_heads(
        tmp_path_factory.mktemp("heads"), idle_heads(3),
        version="2", medusa_num_heads=3, medusa_num_layers=1,
    )  # fmt: skip

    def engine(trees):
        return module_engine(
            model, **(medusa(heads, TREE, lookup=True) if trees else {}),
            skip_tokenizer_init=False, disable_log_stats=False,
            structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
            enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=24,
            max_model_len=256,
        )  # fmt: skip

    return engine


class Traffic:
    """Random requests, with every option of test_matrix.py, some aborted; the same every time."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.numbers = random.Random(1)
        self.running: list[str] = []
        self.num_requests = self.num_tokens = self.num_aborted = 0
        self.options = [option for options in ROWS.values() for option in options]
        self.shared = make_prompts(1, ASCII, prefix=80)[0][:80]

    def step(self) -> None:
        while len(self.running) < AT_ONCE:
            self.add()
        if self.numbers.random() < 0.02:
            name = self.numbers.choice(self.running)
            self.engine.abort_request([name])
            self.running.remove(name)
            self.num_aborted += 1
        for output in self.engine.step():
            if output.finished and output.request_id in self.running:
                self.running.remove(output.request_id)
                self.num_tokens += sum(len(one.token_ids) for one in output.outputs)

    def add(self) -> None:
        numbers, name = self.numbers, str(self.num_requests)
        text = [numbers.randrange(5, VOCAB) for _ in range(60)]
        option = numbers.choice(self.options)(text)
        params = {
            "temperature": numbers.choice([0.0, 0.7, 1.0]),
            "seed": numbers.choice([None, self.num_requests]),  # drafts are drawn without
            "max_tokens": numbers.randint(1, 60),
            "ignore_eos": True,
            **option,
        }
        params["max_tokens"] = max(params["max_tokens"], params.get("min_tokens", 0))
        prompt = text[: numbers.randint(1, 60)]
        if numbers.random() < 0.3:
            prompt = self.shared[: numbers.randint(20, 80)] + prompt
        self.engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**params))
        self.running.append(name)
        self.num_requests += 1


def serve(llm) -> list[dict[str, float]]:
    """Serve all requests; what the process held on the way."""
    traffic, process = Traffic(llm.llm_engine), psutil.Process()
    samples = []
    while traffic.num_requests < NUM_REQUESTS:
        traffic.step()
        if traffic.num_requests >= len(samples) * NUM_REQUESTS // NUM_SAMPLES:
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free, but kept for later, is not held
            samples.append(
                {
                    "requests": traffic.num_requests,
                    "aborted": traffic.num_aborted,
                    "tokens": traffic.num_tokens,
                    "MB": round(process.memory_info().rss / 2**20, 1),
                    "Python objects": len(gc.get_objects()),
                }
            )
            print(json.dumps(samples[-1]), flush=True)
    llm.llm_engine.abort_request(traffic.running)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return samples


def growth(samples, what) -> float:
    """By how much it grew while half of the requests were served: from the second quarter to the
    last, of each the least, as what is on its way comes on top."""
    quarter = len(samples) // 4
    values = [sample[what] for sample in samples]
    return min(values[-quarter:]) - min(values[quarter : 2 * quarter])


def test_memory_stays_flat(start):
    plain = serve(start(trees=False))
    llm = start(trees=True)
    samples = serve(llm)
    if REPORT:
        Path(REPORT).write_text(page(plain, samples))
    # vLLM itself keeps a little of every request.
    assert growth(samples, "MB") < growth(plain, "MB") + 12
    # One object of ours kept for every request would be half as many as there were requests.
    assert growth(samples, "Python objects") < growth(plain, "Python objects") + NUM_REQUESTS / 4
    assert_empty(llm)


def page(plain, samples) -> str:
    """docs/soak.md."""
    keys = [*samples[0], "MB without Medusa"]
    rows = [
        [f"{value:,}" for value in (*sample.values(), other["MB"])]
        for sample, other in zip(samples, plain, strict=True)
    ]
    table = [keys, ["---"] * len(keys), *rows]
    return "\n".join(
        [
            "# Memory over long traffic",
            "",
            "Made by `make soak` (tests/integration/test_soak.py): an engine with a tiny target",
            f"and trees of {len(TREE)} nodes serves {AT_ONCE} requests at a time, of random",
            "lengths and with random options, in too small a cache; one step in fifty aborts",
            "a request. What the process holds, and held before with an engine without Medusa:",
            "",
            *[f"| {' | '.join(row)} |" for row in table],
            "",
            *[f"- {label}: {text}" for label, text in describe_machine().items()],
            "",
        ]
    )
