"""Two replicas behind Ray Serve under load, of which one is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.generation import generate, make_prompts, tokens
from tests.integration.ray_cluster import ROOT, descendants, ray_cluster
from tests.integration.tiny import (
    VOCAB,
    add_tokenizer,
    idle_heads,
    make_repeating_model,
    save_heads,
)
from vllm_medusa.demo.server import free_port

REQUESTS, CLIENTS, TOKENS = 200, 16, 96
START_SECONDS = 900
OPTIONS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--served-model-name", "tiny"
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_tokenizer(make_repeating_model(tmp_path_factory.mktemp("repeats")))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return save_heads(folder, idle_heads(2), version="2", medusa_num_heads=2, medusa_num_layers=1)


@dataclass
class Service:
    """The example, running on a cluster of its own."""

    port: int
    process: subprocess.Popen
    log: Path

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def replicas(self):
        """Process ids of the replicas that run."""
        found = []
        for process in descendants(os.getpid()):
            with suppress(psutil.NoSuchProcess):
                if "ServeReplica" in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def wait(self, what, seconds=START_SECONDS):
        deadline = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self.end_of_log()
            assert time.monotonic() < deadline, self.end_of_log()
            time.sleep(0.5)

    def healthy(self):
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def whole_log(self):
        return self.log.read_text()

    def end_of_log(self):
        return self.whole_log()[-6000:]


@pytest.fixture(scope="module")
def service(model, heads, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "serve.log"
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "ray_serve.py"), str(model), str(heads)]
    command += ["--replicas", "2", "--port", str(port), *OPTIONS]
    with ray_cluster({}, num_cpus=4) as cluster, log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | cluster.environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        service = Service(port, process, log)
        try:
            service.wait(lambda: "is ready at" in service.whole_log())
            service.wait(service.healthy)
            yield service
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(8, VOCAB, longest=40)


@dataclass
class Request:
    """What became of one request."""

    prompt: int
    stream: bool
    begun: float = 0.0
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    def send(self, client, url, prompts):
        body = {
            "model": "tiny",
            "prompt": prompts[self.prompt],
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": self.stream,
        }
        self.begun = time.monotonic()
        try:
            self.receive(client, f"{url}/v1/completions", body)
        except (httpx.HTTPError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        self.ended = time.monotonic()

    def receive(self, client, url, body):
        if not self.stream:
            answer = client.post(url, json=body).raise_for_status().json()
            self.token_ids = answer["choices"][0]["token_ids"]
            return
        with client.stream("POST", url, json=body) as answer:
            answer.raise_for_status()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        if lines[-1:] != ["[DONE]"]:
            raise ValueError(f"the stream ended early: {lines[-1:]}")
        for line in lines[:-1]:
            self.token_ids += json.loads(line)["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def load(service, prompts):
    """200 requests, half of them streamed, from 16 clients; a replica is killed among them."""
    requests = [Request(number % len(prompts), number % 2 == 0) for number in range(REQUESTS)]
    waiting, lock, killed = iter(requests), threading.Lock(), []
    before = service.replicas()

    def work():
        with httpx.Client(timeout=120) as client:
            while True:
                with lock:
                    request = next(waiting, None)
                    # In the middle, while all other clients wait for answers.
                    if request is requests[REQUESTS // 2]:
                        os.kill(before[0], signal.SIGKILL)
                        killed.append(time.monotonic())
                if request is None:
                    return
                request.send(client, service.url, prompts)

    threads = [threading.Thread(target=work) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return before, killed[0], requests


def test_answers(service, prompts, model, engine):
    """Whole and streamed, the tokens of vLLM without speculation."""
    assert len(service.replicas()) == 2
    expected = tokens(generate(engine(model), prompts[:2], max_tokens=TOKENS))
    with httpx.Client(timeout=60) as client:
        for stream in (False, True):
            for number in (0, 1):
                request = Request(number, stream)
                request.send(client, service.url, prompts)
                assert request.token_ids == expected[number], request.error
        names = client.get(f"{service.url}/v1/models").json()
        assert [entry["id"] for entry in names["data"]] == ["tiny"]
        bad = client.post(f"{service.url}/v1/completions", json={"model": "tiny", "prompt": 3.5})
        assert bad.status_code == 400


def test_a_killed_replica_loses_only_what_it_was_serving(load, prompts, model, engine):
    _, killed, requests = load
    failed = [request for request in requests if request.error]
    assert 0 < len(failed) < CLIENTS
    for request in failed:
        assert request.begun < killed, request
        assert request.ended < killed + 10, request
    expected = tokens(generate(engine(model), prompts, max_tokens=TOKENS))
    for request in requests:
        if not request.error:
            assert request.token_ids == expected[request.prompt]


def test_a_new_replica_is_started(load, service):
    before, _, _ = load
    # What vLLM says when it speculates.
    service.wait(lambda: "based on the speculative decoding settings" in service.whole_log())
    service.wait(lambda: len(set(service.replicas()) - {before[0]}) == 2)
    service.wait(service.healthy)
