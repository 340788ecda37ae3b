"""Engines and models for the integration tests."""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm import LLM

from tests.integration.tiny import make_heads, make_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny models by kind and options, made once."""
    made: dict[str, Path] = {}
    numbers = itertools.count()

    def get(kind: str = "llama", **options: object) -> Path:
        key = f"{kind} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{kind}{next(numbers)}")
            made[key] = make_model(folder, kind, **options)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Random heads by number, made once."""
    made: dict[int, Path] = {}

    def get(num_heads: int) -> Path:
        if num_heads not in made:
            made[num_heads] = make_heads(tmp_path_factory.mktemp(f"heads{num_heads}"), num_heads)
        return made[num_heads]

    return get


@pytest.fixture
def engine() -> Iterator[Callable[..., LLM]]:
    """Engines in this process, shut down at the test's end."""
    engines: list[LLM] = []

    def start(model: Path, **options: object) -> LLM:
        defaults: dict[str, object] = {
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "max_model_len": 512,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        llm = LLM(str(model), **defaults | options)  # type: ignore[arg-type]
        engines.append(llm)
        return llm

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()
    del engines[:]
    gc.collect()
