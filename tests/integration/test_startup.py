"""What the plugin costs a vLLM process that does not use Medusa: it imports next to nothing.

`make startup` measures the time; what is imported decides it, and does not vary with the machine.
"""

import subprocess
import sys

import pytest

from benchmarks.startup import PROCESSES, load_plugins

OURS = {
    "vllm_medusa",
    "vllm_medusa.after_import",
    "vllm_medusa.manifest",
    "vllm_medusa.options",
    "vllm_medusa.plugin",
}


@pytest.mark.parametrize("process", PROCESSES)
def test_modules_that_are_imported(process):
    imported = set(load_plugins(PROCESSES[process], "medusa")["modules"])
    assert imported & OURS == OURS
    others = imported - OURS
    assert not {name for name in others if name.startswith("vllm_medusa")}
    # Nothing of vLLM that the process had not imported anyway, and no large library.
    assert not {name for name in others if name.split(".")[0] in ("vllm", "torch", "transformers")}


LATER = """
import importlib, sys
import vllm.v1.worker.worker_base
from vllm.plugins import load_general_plugins
load_general_plugins()
assert "vllm.engine.arg_utils" not in sys.modules
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.config import VllmConfig
for function in (
    EngineArgs.add_cli_args,
    EngineArgs.create_speculative_config,
    EngineArgs.create_engine_config,
    SamplingParams._validate_spec_decode,
    VllmConfig._get_v2_model_runner_unsupported_features,
):
    assert function.__code__.co_filename.endswith("vllm_medusa/plugin.py"), function
print("ALL WRAPPED")
"""


def test_what_is_imported_later_is_wrapped_then():
    result = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert "ALL WRAPPED" in result.stdout, result.stderr[-2000:]
