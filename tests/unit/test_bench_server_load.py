"""The load test: ratios, whole answers, and clients against a server that answers at once."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from vllm_medusa.bench.server_load import (
    HEADINGS,
    Load,
    LoadError,
    draw,
    group_cpu_seconds,
    level_cells,
    page,
    send_load,
    server_options,
    summarize_level,
)
from vllm_medusa.demo.prompts import Prompt


@pytest.fixture
def level():
    pairs = [
        (Load(10.0, 100, ["a", "b"]), Load(5.0, 100, ["a", "b"])),
        (Load(10.0, 100, ["a", "b"]), Load(20.0, 100, ["a", "c"], others=0.5)),
        (Load(20.0, 100, ["a", "b"]), Load(16.0, 100, ["a", "b"])),
    ]
    return summarize_level(4, pairs)


def test_ratios_are_taken_pair_by_pair(level):
    assert level.ratios == [2.0, 0.5, 1.25]
    assert level.ratio == 1.25
    assert level.tokens_per_second == (10.0, 6.25)
    assert (level.identical, level.disturbed) == (5, 1)


def test_page_and_picture(level, tmp_path):
    cells = level_cells(level, 3)
    assert len(cells) == len(HEADINGS)
    assert "| 4 | 2 | 10.0 | 6.2 | 1.25 | 0.50-2.00 | 5 of 6 | 1 of 3 |" in page(
        [level], {"CPU": "abacus"}, 3, "again"
    )
    pytest.importorskip("matplotlib")
    draw([level, level], tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


class Answers(BaseHTTPRequestHandler):
    """The part of OpenAI's interface that the clients use."""

    lock = threading.Lock()
    at_once = most_at_once = 0
    ending = ("length", 4)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Answers.lock:
            Answers.at_once += 1
            Answers.most_at_once = max(Answers.most_at_once, Answers.at_once)
        time.sleep(0.05)
        with Answers.lock:
            Answers.at_once -= 1
        reason, tokens = Answers.ending
        text = request["messages"][-1]["content"].upper()
        body = {
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [{"index": 0, "finish_reason": reason,
                         "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
        }  # fmt: skip
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def base_url(monkeypatch):
    for name, value in (("at_once", 0), ("most_at_once", 0), ("ending", ("length", 4))):
        monkeypatch.setattr(Answers, name, value)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


PROMPTS = [Prompt(f"prompt {number}", "chat", f"text {number}") for number in range(8)]


def test_all_prompts_are_answered_by_so_many_clients(base_url):
    load = send_load(base_url, "tiny", PROMPTS, clients=4, max_tokens=4)
    assert load.texts == [f"TEXT {number}" for number in range(8)]
    assert load.tokens == 8 * 4
    assert Answers.most_at_once == 4
    assert load.seconds >= 0.1
    Answers.most_at_once = 0
    send_load(base_url, "tiny", PROMPTS[:2], clients=1, max_tokens=4)
    assert Answers.most_at_once == 1


def test_an_answer_that_is_not_whole_is_an_error(base_url):
    Answers.ending = ("length", 3)
    with pytest.raises(LoadError, match="prompt 0 ended after 3 tokens with 'length'"):
        send_load(base_url, "tiny", PROMPTS[:1], clients=1, max_tokens=4)
    Answers.ending = ("stop", 3)
    assert send_load(base_url, "tiny", PROMPTS[:1], clients=1, max_tokens=4).tokens == 3
    Answers.ending = ("abort", 3)
    with pytest.raises(LoadError, match="abort"):
        send_load(base_url, "tiny", PROMPTS[:1], clients=1, max_tokens=4)


def test_cpu_seconds_of_a_process_group():
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", busy],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    process.stdout.readline()
    assert 0.25 <= group_cpu_seconds(process.pid) < 1
    assert group_cpu_seconds(process.pid) < group_cpu_seconds(os.getpgrp()) + 1
    process.communicate(b"\n")
    assert group_cpu_seconds(process.pid) == 0


@pytest.mark.parametrize("on_cuda", [False, True])
def test_both_servers_fit_on_one_gpu(on_cuda):
    args = SimpleNamespace(dtype="auto", max_model_len=1024, eager=True)
    options = server_options(args, on_cuda)
    assert "--enforce-eager" in options
    assert ("--gpu-memory-utilization" in options) == on_cuda
    if on_cuda:
        assert options[options.index("--gpu-memory-utilization") + 1] == "0.45"
