"""The demo's model behind the real server, with its heads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_medusa.demo.model import demo_model
from vllm_medusa.demo.server import Server

HEADS = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct"
OPTIONS = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct, converted once."""
    return demo_model()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """`vllm serve` with Medusa; stopped as by Ctrl-C, which must end it cleanly."""
    # The strings let requests have a thinking budget.
    thinking = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    server = Server(
        model,
        [
            "--speculative-model", f"medusa:{HEADS}", "--spec-tokens", "7",
            "--reasoning-config", json.dumps(thinking),
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *OPTIONS,
        ],
    )  # fmt: skip
    server.start()
    yield server
    server.stop()
