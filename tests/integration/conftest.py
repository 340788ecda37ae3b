"""Engines and models for the integration tests."""

import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm import LLM, RequestOutput
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from tests.integration.generation import generate
from tests.integration.tiny import make_heads, make_model
from tests.triton_interpreter import ENABLED as INTERPRETED


@pytest.fixture(scope="session", autouse=INTERPRETED)
def top_k_top_p_of_torch() -> Iterator[None]:
    """vLLM's Triton kernel for top-k and top-p does not run in the interpreter (it asks whole
    numbers of Python's for methods of Triton's); its PyTorch function gives the same."""
    from vllm.v1.sample.ops import topk_topp_sampler

    def apply(logits, k, p, has_topp_only_rows=True):  # a hint, since 0.33
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_topp_sampler, "apply_top_k_top_p_triton", apply)
        yield


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


class Engines:
    """Engines in this process; asked again with the same arguments, the same one."""

    def __init__(self) -> None:
        self.running: dict[str, LLM] = {}

    def __call__(self, model: Path, **options: object) -> LLM:
        key = f"{model} {sorted(options.items())}"
        if key not in self.running:
            defaults: dict[str, object] = {
                "dtype": "float32",
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "max_model_len": 512,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 4096,
                "enable_prefix_caching": False,
                "num_gpu_blocks_override": 256,
                "seed": 0,
            }
            self.running[key] = LLM(str(model), **defaults | options)  # type: ignore[arg-type]
        return self.running[key]

    def drop(self) -> None:
        """Free the engines.

        They are not shut down: that ends the process groups, which all engines in a process share.
        """
        for llm in self.running.values():
            llm.llm_engine.engine_core._finalizer.detach()
        self.running.clear()
        gc.unfreeze()  # every engine froze what there was when it started
        gc.collect()


@pytest.fixture
def engine() -> Iterator[Engines]:
    """Engines that live as long as the test."""
    engines = Engines()
    yield engines
    engines.drop()


@pytest.fixture(scope="module")
def module_engine() -> Iterator[Engines]:
    """Engines that the tests of a module share."""
    engines = Engines()
    yield engines
    engines.drop()


@pytest.fixture(scope="session")
def plain_engine() -> Iterator[Engines]:
    """Engines without speculation, for references; shared by all tests."""
    engines = Engines()
    yield engines
    engines.drop()
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def reference(plain_engine: Engines) -> Callable[..., list[RequestOutput]]:
    """What vLLM says without speculation: like ``generate`` with a model's folder for the engine.

    All prompts are read whole, in one batch. Computed once for the same arguments.
    """
    known: dict[str, list[RequestOutput]] = {}

    def get(model: Path, prompts: list[list[int]], each=None, **params) -> list[RequestOutput]:
        key = repr((model, prompts, each, sorted(params.items())))
        if key not in known:
            known[key] = generate(plain_engine(model), prompts, each, **params)
        return known[key]

    return get
