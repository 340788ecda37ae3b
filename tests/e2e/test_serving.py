"""The real server with a real model: the same text as without speculation."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.conftest import HEADS, OPTIONS
from vllm_medusa.bench.engine import Engine
from vllm_medusa.bench.variants import Variant
from vllm_medusa.demo.prompts import demo_prompts
from vllm_medusa.demo.server import Server

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = 48


@pytest.fixture(scope="module")
def prompts():
    return [prompt.text for prompt in demo_prompts()[:6]]


@pytest.fixture(scope="module")
def expected(model):
    """The answers of vLLM without speculation."""
    from transformers import AutoTokenizer

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
    engine = Engine(Variant("e2e reference", None), str(model), options)
    engine.start()
    answers, *_ = engine.generate(demo_prompts()[:6], TOKENS)
    engine.stop()
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]


def metric(server: Server, name: str) -> float:
    url = server.base_url.removesuffix("/v1") + "/metrics"
    with urllib.request.urlopen(url) as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (.+)$", text, re.MULTILINE))


def test_streams_the_same_text(server, prompts, expected):
    answers = ["".join(server.stream_chat(prompt, TOKENS)) for prompt in prompts]
    assert answers == expected
    drafts = metric(server, "vllm:spec_decode_num_drafts_total")
    accepted = metric(server, "vllm:spec_decode_num_accepted_tokens_total")
    assert drafts > 0
    assert accepted > 0.1 * drafts


def test_same_text_under_concurrent_requests(server, prompts, expected):
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        answers[index] = "".join(server.stream_chat(prompts[index], TOKENS))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[index] for index in range(len(prompts))] == expected


def test_seeded_sampling_and_several_choices(server):
    client = OpenAI(base_url=server.base_url, api_key="unused")

    def ask() -> list[str]:
        answer = client.chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": "Name a city."}],
            max_tokens=16,
            temperature=0.8,
            top_p=0.9,
            seed=7,
            n=3,
            extra_body={"min_p": 0.02},
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "city": {"type": "string", "maxLength": 20},
        },
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}


def test_structured_output_is_served_with_trees(server):
    client = OpenAI(base_url=server.base_url, api_key="unused")
    names = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")
    before = [metric(server, name) for name in names]
    answer = client.chat.completions.create(
        model=server.name,
        messages=[{"role": "user", "content": "Invent three people, as JSON."}],
        max_tokens=200,
        temperature=0.0,
        extra_body={"structured_outputs": {"json": PEOPLE}},
    )
    people = json.loads(answer.choices[0].message.content)
    assert [set(person) for person in people] == [{"name", "age", "city"}] * 3
    drafts, accepted = (metric(server, name) - old for name, old in zip(names, before, strict=True))
    assert 1 + accepted / drafts > 1.3


TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


def test_echo_and_tool_calls(server):
    client = OpenAI(base_url=server.base_url, api_key="unused")
    text = "The capital of France is"
    request = {"model": server.name, "prompt": text, "max_tokens": 12, "temperature": 0.0}
    plain = client.completions.create(**request).choices[0].text
    echoed = client.completions.create(**request, echo=True, logprobs=1).choices[0]
    assert echoed.text == text + plain
    assert "".join(echoed.logprobs.tokens) == echoed.text

    answer = client.chat.completions.create(
        model=server.name,
        messages=[{"role": "user", "content": "What will the weather be in Paris?"}],
        tools=[{"type": "function", "function": TOOL}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=60,
        temperature=0.0,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    json.loads(call.function.arguments)  # vLLM's parser for this model asks for no more


def test_requests_without_trees_are_counted(server):
    client = OpenAI(base_url=server.base_url, api_key="unused")
    names = ("vllm:medusa_requests_without_trees_total", "vllm:spec_decode_num_drafts_total")
    before = [metric(server, name) for name in names]
    for number in (1, 2):
        client.chat.completions.create(
            model=server.name,
            messages=[{"role": "user", "content": "Is water wet?"}],
            max_tokens=8,
            n=number,
            extra_body={"thinking_token_budget": 4},
        )
    counted, drafts = (metric(server, name) - old for name, old in zip(names, before, strict=True))
    assert counted == 3
    assert drafts == 0


# What is wrong, and a word of vLLM's answer.
MALFORMED = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n must be"),
    ({"extra_body": {"min_tokens": 9}}, "min_tokens"),
    ({"extra_body": {"min_p": 2}}, "min_p"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
    ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "regex"),
    ({"extra_body": {"structured_outputs": {"json": {"type": "nothing"}}}}, "Invalid type"),
    ({"messages": [{"role": "user", "content": "very " * 2000 + "long"}]}, "1024"),
]


def test_malformed_requests_get_an_error_and_disturb_nobody(server, prompts, expected):
    client = OpenAI(base_url=server.base_url, api_key="unused", max_retries=0)
    stream = server.stream_chat(prompts[0], TOKENS)
    beginning = next(stream)
    for options, word in MALFORMED:
        message = [{"role": "user", "content": "Hello"}]
        request = {"model": server.name, "messages": message, "max_tokens": 8, **options}
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(**request)
        assert word in str(refused.value)
    assert beginning + "".join(stream) == expected[0]


def test_example_client(server):
    result = run_example("client.py", "Why is the sky blue?", "--port", str(server.port))
    assert len(result.split()) > 10


def test_example_streaming_chat(server):
    result = run_example(
        "streaming_chat.py", "--port", str(server.port), "--max-tokens", "32",
        typed="Name three colours.\nAnd three more.\n\n",
    )  # fmt: skip
    answers = re.findall(r"\[(\d+) tokens in (\d+) chunks", result)
    assert len(answers) == 2
    # Steps that accept drafts send several tokens in a chunk.
    assert sum(int(tokens) for tokens, _ in answers) > sum(int(chunks) for _, chunks in answers)


def test_metrics_that_are_queried_exist(server):
    """Those of the dashboard and of docs/serving.md, at the server's own /metrics."""
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"][1:]]
    queries.append((EXAMPLES.parent / "docs" / "serving.md").read_text())
    names = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert len(names) > 12
    "".join(server.stream_chat("Hello", 8))
    with urllib.request.urlopen(server.base_url.removesuffix("/v1") + "/metrics") as response:
        served = set(re.findall(r"^(vllm:\w+)", response.read().decode(), re.MULTILINE))
    assert names <= served
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_example_offline(model):
    result = run_example(
        "offline.py", str(model), str(HEADS), "--max-tokens", "24", "--enforce-eager"
    )
    assert "# Why is the sky blue?" in result


def test_vllm_bench(model):
    """`vllm bench` takes the options too."""
    result = run_vllm(
        "bench", "latency", "--model", str(model), "--spec-model", f"medusa:{HEADS}",
        "--input-len", "16", "--output-len", "16", "--batch-size", "1", "--num-iters", "1",
        "--num-iters-warmup", "1", *OPTIONS,
    )  # fmt: skip
    assert "Avg latency" in result.stdout
    assert "Medusa: 4 heads" in result.stdout + result.stderr


def test_help_shows_the_flag():
    assert "--speculative-model" in run_vllm("serve", "--help=speculative").stdout


def test_bad_heads_end_the_server_with_a_clear_message(model, tmp_path):
    result = run_vllm(
        "serve", str(model), "--speculative-model", f"medusa:{tmp_path / 'none'}", *OPTIONS,
        expected_status=1,
    )  # fmt: skip
    assert str(tmp_path / "none") in result.stdout + result.stderr
    assert "HeadsError" in result.stdout + result.stderr


def run_example(name: str, *arguments: str, typed: str | None = None) -> str:
    return run([sys.executable, str(EXAMPLES / name), *arguments], typed=typed).stdout


def run_vllm(*arguments: str, expected_status: int = 0) -> subprocess.CompletedProcess[str]:
    return run(
        [str(Path(sys.executable).with_name("vllm")), *arguments], expected_status=expected_status
    )


def run(
    command: list[str], expected_status: int = 0, typed: str | None = None
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "COLUMNS": "120",
    }
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
        input=typed,
    )
    assert result.returncode == expected_status, result.stdout[-3000:] + result.stderr[-3000:]
    return result
