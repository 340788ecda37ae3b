"""Tensor parallelism over a Ray cluster of two nodes: what one process gives, and clear errors."""

import json
import re
from pathlib import Path

import httpx
import pytest
import torch
from openai import OpenAI
from vllm import SamplingParams

from tests.integration.generation import generate, make_prompts, tokens
from tests.integration.ray_cluster import ray_cluster
from tests.integration.ray_generate import SEED
from tests.integration.tiny import (
    HIDDEN,
    VOCAB,
    add_byte_tokenizer,
    idle_heads,
    make_heads,
    make_repeating_model,
    save_heads,
)
from vllm_medusa import __version__
from vllm_medusa.bench.communication import Target, step_collectives
from vllm_medusa.demo.server import Server
from vllm_medusa.tree import TokenTree

SCRIPT = str(Path(__file__).with_name("ray_generate.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "ray_tensor_parallel.py")
TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [3]]
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
}


def medusa(heads):
    return {"method": "medusa", "model": str(heads), "tree": TREE, "lookup": False}


def run(cluster, model, heads, prompts=(), tensor_parallel_size=2, **environment):
    engine = ENGINE | {"speculative_config": medusa(heads)}
    engine["tensor_parallel_size"] = tensor_parallel_size
    arguments = {"model": str(model), "engine": engine, "prompts": prompts}
    environment = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **environment}
    return cluster.run([SCRIPT, json.dumps(arguments)], **environment)


def serve(cluster, model, heads, prompts):
    """What `vllm serve` with the option that users give answers on the cluster."""
    options = [
        "--distributed-executor-backend", "ray", "--tensor-parallel-size", "2",
        "--speculative-model", f"medusa:{heads}", "--spec-tokens", "7",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "8",
    ]  # fmt: skip
    server = Server(model, options)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        server.start()
    try:
        client = OpenAI(base_url=server.base_url, api_key="unused")
        answer = client.completions.create(
            model=server.name, prompt=prompts, max_tokens=32, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        metrics = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    except BaseException:
        server.kill()
        raise
    server.stop()
    return {"tokens": [choice.token_ids for choice in answer.choices], "metrics": metrics}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_byte_tokenizer(make_repeating_model(tmp_path_factory.mktemp("repeats")))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return save_heads(folder, idle_heads(2), version="2", medusa_num_heads=2, medusa_num_layers=1)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(6, VOCAB, longest=40)


@pytest.fixture(scope="module")
def on_ray(model, heads, prompts):
    """What an engine with two ranks on two nodes gave."""
    with ray_cluster({}, {}) as cluster:
        result = run(cluster, model, heads, prompts, VLLM_ENABLE_V1_MULTIPROCESSING="1")
        nodes = cluster.nodes
        arguments = [str(model), str(heads), "--dtype", "float32", "--max-tokens", "16"]
        example = cluster.run([EXAMPLE, *arguments], VLLM_ENABLE_V1_MULTIPROCESSING="1")
        server = serve(cluster, model, heads, prompts)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stdout[-3000:] + result.stderr[-6000:]
    return json.loads(lines[0].removeprefix("RESULT ")) | {
        "nodes": nodes,
        "example": example,
        "server": server,
    }


def test_a_worker_of_ours_on_each_node(on_ray):
    assert sorted(node for node, _ in on_ray["where"]) == sorted(on_ray["nodes"])
    assert {worker for _, worker in on_ray["where"]} == {"MedusaCPUWorker"}
    assert on_ray["plugin"] == [True, True]


def test_the_text_of_one_process(on_ray, model, heads, prompts, engine):
    one_process = engine(model, speculative_config=medusa(heads))
    assert on_ray["greedy"] == tokens(generate(one_process, prompts, max_tokens=48))
    assert on_ray["greedy"] == tokens(generate(engine(model), prompts, max_tokens=48))
    expected = []
    for prompt in prompts:
        torch.manual_seed(SEED)
        expected += tokens(generate(one_process, [prompt], temperature=0.8, max_tokens=24))
    assert on_ray["sampled"] == expected


def test_the_example(on_ray, model, engine):
    output = on_ray["example"]
    assert output.returncode == 0, output.stderr[-6000:]
    llm = engine(model, skip_tokenizer_init=False)
    params = SamplingParams(temperature=0, max_tokens=16)
    for prompt in ("The sky is blue because", "def reverse(text):"):
        text = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
        assert f"# {prompt}\n{text}\n" in output.stdout


def test_the_server(on_ray):
    served = on_ray["server"]
    assert served["tokens"] == [text[:32] for text in on_ray["greedy"]]
    accepted = re.search(
        r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)", served["metrics"], re.M
    )
    assert float(accepted[1]) > 10


def test_one_rank_decides(on_ray):
    """Ranks whose random numbers differ keep the same tokens, those of the first."""
    assert on_ray["sampled, ranks seeded differently"] == on_ray["sampled"]
    kept = [
        [(step["tokens"], step["rows"]) for step in steps if step["tokens"]]
        for steps in on_ray["steps, sampled"]
    ]
    assert kept[0] == kept[1]
    accepted = [sum(token >= 0 for token in step[0][0]) - 1 for step in kept[0]]
    assert max(accepted) > 0


def test_what_ranks_send_each_other(on_ray):
    """The collectives of a step are those that docs/ray.md counts."""
    target = Target("tiny", layers=2, hidden=HIDDEN, vocab=VOCAB, bytes_per_number=4)
    tree = TokenTree.from_paths(TREE)
    expected = [list(one) for one in step_collectives(target, 2, requests=1, tree=tree)]
    for steps in on_ray["steps, greedy"]:
        decoded = [step["collectives"] for step in steps if step["collectives"]]
        with_tree = [found for found in decoded if found[0][1] == expected[0][1]]
        assert len(with_tree) > 5
        assert all(found == expected for found in with_tree)


def test_every_node_that_lacks_something_is_named(model, heads, tmp_path):
    """One node has all, one no plugin, one no heads, and one other heads of the same name."""
    for home, found in ("all", heads), ("other", make_heads(tmp_path / "heads", 2)):
        put_into_cache(tmp_path / home, found)
    all_there = {"HF_HOME": str(tmp_path / "all")}
    lacking = [
        all_there | {"TEST_RAY_MISSING_PACKAGES": "vllm_medusa"},
        {"HF_HOME": str(tmp_path / "nothing")},
        {"HF_HOME": str(tmp_path / "other")},
    ]
    with ray_cluster(all_there, *lacking) as cluster:
        result = run(cluster, model, "someone/heads", tensor_parallel_size=4, **all_there)
        good, no_plugin, no_heads, other_heads = cluster.nodes
    assert result.returncode != 0
    message = result.stderr[result.stderr.rindex("medusa cannot start on this Ray cluster:") :]
    assert good not in message
    lines = message.splitlines()
    for node, words in {
        no_plugin: ["vllm-medusa is not installed", f"pip install vllm-medusa=={__version__}"],
        no_heads: ['medusa heads "someone/heads": not a folder', "give a hub id that every node"],
        other_heads: ["the heads differ", "medusa_lm_head.safetensors", "Copy the heads to"],
    }.items():
        (line,) = [line for line in lines if f"node 127.0.0.1 (Ray node id {node})" in line]
        for word in words:
            assert word in line


def put_into_cache(home, heads):
    """Lay heads into the hub's cache as the repository someone/heads."""
    repository = home / "hub" / "models--someone--heads"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in heads.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
