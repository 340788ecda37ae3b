"""Without Medusa asked for, vLLM is as it is without the plugin."""

import json
import os
import subprocess
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from tests.integration.generation import make_prompts
from tests.integration.tiny import VOCAB
from vllm_medusa.plugin import register

# Each run in a process of its own: a plugin cannot be taken out again.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    model, prompts, speculation = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, seed=0,
              max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
              speculative_config=speculation)
    config = llm.llm_engine.vllm_config
    params = [SamplingParams(temperature=index % 2, seed=index, max_tokens=24, ignore_eos=True,
                             detokenize=False) for index in range(len(prompts))]
    if speculation is None:
        params[-1].min_p = 0.1
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    print("RESULT " + json.dumps({
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "hash": config.compute_hash(),
        "worker": config.parallel_config.worker_cls,
        "modules": sorted(name for name in sys.modules if name.startswith("vllm_medusa")),
        "backend": llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
            .model_runner.attn_groups[0][0].backend.__module__,
    }))

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """Serve in a process of its own; returns what the script found."""
    script = tmp_path_factory.mktemp("untouched") / "serve.py"
    script.write_text(SCRIPT)
    # Short prompts: vLLM cannot read those of requests with a seed in pieces on a CPU.
    prompts = make_prompts(6, VOCAB, longest=8, seed=31)

    def serve(speculation=None, **environment):
        result = subprocess.run(
            [sys.executable, script, models(), json.dumps(prompts), json.dumps(speculation)],
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, result.stderr[-3000:]
        return json.loads(lines[0].removeprefix("RESULT "))

    return serve


@pytest.mark.parametrize(
    "speculation",
    [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}],
    ids=["no speculation", "ngram"],
)
def test_same_with_and_without_the_plugin(speculation, run):
    without = run(speculation, VLLM_PLUGINS="")
    assert without["modules"] == []
    with_plugin = run(speculation)
    # Nothing was imported but the entry point and what looks at the options.
    assert with_plugin.pop("modules") == [
        "vllm_medusa", "vllm_medusa.options", "vllm_medusa.plugin",
    ]  # fmt: skip
    del without["modules"]
    assert with_plugin == without
    assert "medusa" not in json.dumps(without)


def test_registering_again_changes_nothing():
    register()
    seams = (
        (EngineArgs, "add_cli_args"),
        (EngineArgs, "create_speculative_config"),
        (EngineArgs, "create_engine_config"),
        (SamplingParams, "_validate_spec_decode"),
    )
    before = [getattr(owner, name) for owner, name in seams]
    register()
    assert [getattr(owner, name) for owner, name in seams] == before


def test_vllm_own_refusals_stay(models):
    """min-p with another kind of speculation is still vLLM's to refuse."""
    register()
    config = EngineArgs(
        model=str(models()),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        speculative_config={
            "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2,
        },
    ).create_engine_config()  # fmt: skip
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
        SamplingParams(min_p=0.5)._validate_spec_decode(config.speculative_config)
