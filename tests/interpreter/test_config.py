"""The configuration where vLLM chooses its V2 runner."""

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.integration.tiny import make_heads, make_model
from tests.triton_interpreter import ENABLED

if not ENABLED:
    pytest.skip("needs VLLM_USE_V2_MODEL_RUNNER=1 (make test-v2)", allow_module_level=True)


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
