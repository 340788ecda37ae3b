"""Without Medusa asked for, vLLM is as it is without the plugin."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.structured_output import StructuredOutputManager

from tests.integration.generation import make_prompts
from tests.integration.tiny import VOCAB
from vllm_medusa import plugin
from vllm_medusa.manifest import read_manifest, supported_versions
from vllm_medusa.plugin import register

# In a process of its own: a plugin cannot be taken out again.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

SPECULATION = [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}]

def serve(speculation):
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, seed=0,
              max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
              num_gpu_blocks_override=64, speculative_config=speculation)
    prompts = json.loads(sys.argv[2])
    params = [SamplingParams(max_tokens=24, detokenize=False, temperature=0) for _ in prompts]
    # With speculation a CPU's vLLM draws by chance for greedy requests beside others.
    if speculation is None:
        params[-1] = SamplingParams(max_tokens=24, detokenize=False, seed=1, min_p=0.1)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "hash": llm.llm_engine.vllm_config.compute_hash(),
        "worker": llm.llm_engine.vllm_config.parallel_config.worker_cls,
        "runner": type(runner).__qualname__,
        "attention": runner.attn_groups[0][0].backend.__module__,
    }

if __name__ == "__main__":
    found = [serve(speculation) for speculation in SPECULATION]
    modules = sorted(name for name in sys.modules if name.startswith("vllm_medusa"))
    print("RESULT " + json.dumps([found, modules]))
"""


def test_same_with_and_without_the_plugin(models, tmp_path):
    script = tmp_path / "serve.py"
    script.write_text(SCRIPT)
    # Short prompts: vLLM cannot read those of requests with a seed in pieces on a CPU.
    prompts = json.dumps(make_prompts(6, VOCAB, longest=8, seed=31))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    runs = [
        subprocess.Popen(
            [sys.executable, script, models(), prompts],
            env=environment | plugins,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for plugins in ({}, {"VLLM_PLUGINS": ""})
    ]
    results = []
    for run in runs:
        output, errors = run.communicate(timeout=300)
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert lines, errors[-3000:]
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
    (with_plugin, modules), (without, none) = results
    assert with_plugin == without
    assert "medusa" not in json.dumps(without).lower()
    # Of the package only the entry point was imported, and what looks at version and options.
    assert none == []
    assert modules == [
        "vllm_medusa",
        "vllm_medusa.after_import",
        "vllm_medusa.manifest",
        "vllm_medusa.options",
        "vllm_medusa.plugin",
    ]


# All that the entry point wraps.
WRAPPED = (
    (EngineArgs, "add_cli_args"),
    (EngineArgs, "create_speculative_config"),
    (EngineArgs, "create_engine_config"),
    (SamplingParams, "_validate_spec_decode"),
    (VllmConfig, "_get_v2_model_runner_unsupported_features"),
    (VllmConfig, "__post_init__"),
    (Scheduler, "update_draft_token_ids"),
    (StructuredOutputManager, "validate_tokens"),
    (StructuredOutputManager, "grammar_bitmask"),
    (StructuredOutputManager, "accept_tokens"),
    (PrometheusStatLogger, "__init__"),
    (InputProcessor, "process_inputs"),
)


def test_registering_again_changes_nothing():
    register()
    before = [getattr(owner, name) for owner, name in WRAPPED]
    register()
    assert [getattr(owner, name) for owner, name in WRAPPED] == before


def test_all_that_is_wrapped_is_in_every_manifest():
    register()
    for owner, name in WRAPPED:
        wrapper = inspect.unwrap(getattr(owner, name), stop=_is_ours)
        assert _is_ours(wrapper), (owner, name)
    # Each is wrapped by an assignment to the class, and by nothing else.
    assigned = re.findall(r"^    (\w+)\.(\w+) = ", inspect.getsource(plugin), re.MULTILINE)
    assert sorted(assigned) == sorted((owner.__name__, name) for owner, name in WRAPPED)
    for version in supported_versions():
        seams = {seam["name"] for seam in read_manifest(version)}
        missing = {
            f"{owner.__module__}:{owner.__qualname__}.{name}" for owner, name in WRAPPED
        } - seams
        assert not missing, (version, missing)


def _is_ours(function):
    return function.__code__.co_filename == plugin.__file__


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


UNKNOWN_RELEASE = """
import sys
import vllm
vllm.__version__ = "9.9.9"
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
parser = EngineArgs.add_cli_args
del SamplingParams._validate_spec_decode, EngineArgs.spec_tokens  # a release may lack them
args = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, spec_model="medusa:heads")
assert EngineArgs.add_cli_args is parser
try:
    args.create_speculative_config(None, None)
except RuntimeError as error:
    print("RESULT", error)
"""


def test_an_unknown_release_is_left_alone(models):
    result = subprocess.run(
        [sys.executable, "-c", UNKNOWN_RELEASE, models()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "RESULT vllm-medusa does not support vLLM 9.9.9" in result.stdout, result.stderr[-2000:]
