"""An engine dies in the middle of a step: nobody hangs, and the server ends, as vLLM's does."""

import threading
import time

import psutil
import pytest
from openai import OpenAI, OpenAIError

from tests.e2e.conftest import HEADS, OPTIONS
from vllm_medusa.demo.server import Server

PATIENCE = 60  # seconds, on a busy machine


@pytest.fixture
def own_server(model):
    server = Server(model, ["--speculative-model", f"medusa:{HEADS}", *OPTIONS])
    server.start()
    yield server
    server.kill()


def test_no_client_hangs_and_the_server_ends(own_server):
    client = OpenAI(base_url=own_server.base_url, api_key="unused", max_retries=0, timeout=600)
    ends: list[OpenAIError] = []
    streaming = threading.Barrier(4)

    def ask(number: int) -> None:
        message = [{"role": "user", "content": f"Tell a story of {number} foxes."}]
        try:
            chunks = client.chat.completions.create(
                model=own_server.name, messages=message, max_tokens=900, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            next(iter(chunks))
            streaming.wait(PATIENCE)
            list(chunks)
        except OpenAIError as error:
            ends.append(error)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    streaming.wait(PATIENCE)
    time.sleep(0.5)  # into the middle of their answers
    engines = [
        process
        for process in psutil.Process(own_server.process.pid).children(recursive=True)
        if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline())
    ]
    assert engines
    for engine in engines:
        engine.kill()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert len(ends) == len(threads)  # each was told, none got the beginning for the whole
    own_server.process.wait(PATIENCE)  # with status 0, as without Medusa
