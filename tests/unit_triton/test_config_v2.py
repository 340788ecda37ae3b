"""The configuration where vLLM chooses its V2 runner."""

from dataclasses import replace

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.integration.tiny import make_heads, make_model


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("target"))
    heads = make_heads(tmp_path_factory.mktemp("heads"), 3)

    def engine_config(**options):
        return EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=128,
            speculative_config={"method": "medusa", "model": str(heads)},
            **options,
        ).create_engine_config()

    return engine_config


@pytest.mark.parametrize(("asked", "found"), [(None, True), (True, True), (False, False)])
def test_scheduling_ahead_stays_on(asked, found, build):
    config = build(async_scheduling=asked)
    assert config.use_v2_model_runner
    assert config.scheduler_config.async_scheduling is found
    # vLLM's kernel tuning builds the whole configuration anew from parts of a finished one.
    again = replace(config, cache_config=replace(config.cache_config))
    assert again.scheduler_config.async_scheduling is found
