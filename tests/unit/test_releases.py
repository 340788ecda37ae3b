"""Every supported release of vLLM, on its Python source: installed, or unpacked from its wheel.

``python -m ci.vllm_source`` (``make releases``) unpacks wheels into .cache; a release that is not
here is skipped, and the summary says how to get it. What an unpacked release is asked runs in a
process of its own, with that release in the place of the installed vLLM.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.vllm_source import find_source, installed_version
from tests.integration.tiny import make_heads, make_model
from vllm_medusa.manifest import differing_seams, manifest_folder, supported_versions

ROOT = Path(__file__).parents[2]
NOT_INSTALLED = [version for version in supported_versions() if version != installed_version()]
DIFFS = sorted(manifest_folder().glob("upstream-*.diff"))


def source_of(version: str) -> Path:
    root = find_source(version)
    if root is None:
        pytest.skip(f"NOT CHECKED: the source of vLLM {version} is not here; run make releases")
    return root


@pytest.mark.parametrize("version", supported_versions())
def test_seams_are_as_in_the_manifest(version):
    assert differing_seams(version, source_of(version)) == []


def run_against(source: Path, script: str, *arguments: object) -> dict:
    """What a script prints as JSON behind "RESULT", run with the vLLM of ``source``."""
    environment = os.environ | {
        "PYTHONPATH": f"{source}:{ROOT}",
        "VLLM_PLUGINS": "",
        "VLLM_TARGET_DEVICE": "cpu",  # wheels for GPUs are imported on a CPU, too
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    result = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=source, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return make_heads(tmp_path_factory.mktemp("heads"), 3)


CONFIGURE = """
import ast, importlib, json, os, pathlib, pkgutil, sys
from tests import triton_interpreter
triton_interpreter.enable()  # as on a GPU: Triton is there, and with it the V2 runner
import vllm
import vllm_medusa

target, heads = sys.argv[1:]
found = {"version": vllm.__version__, "not imported": {}}
for module in pkgutil.walk_packages(vllm_medusa.__path__, "vllm_medusa."):
    try:
        importlib.import_module(module.name)
    except Exception as error:
        found["not imported"][module.name] = repr(error)
# What functions import is not asked for by that.
for path in pathlib.Path(vllm_medusa.__path__[0]).rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            try:
                exec(ast.unparse(node), {})
            except ImportError as error:
                found["not imported"][f"{path.name}:{node.lineno}"] = repr(error)

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_medusa.plugin import register

register()

def parse(*arguments):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = ["--model", target, "--skip-tokenizer-init", "--max-model-len", "128", *arguments]
    return AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))

# Without the plugin's last word, what is served: the configuration as vLLM completes it.
create_engine_config = EngineArgs.create_engine_config.__wrapped__
spellings = [
    ["--speculative-model", f"medusa:{heads}"],
    ["--spec-method", "medusa", "--spec-model", heads],
    ["--speculative-config", json.dumps({"method": "medusa", "model": heads})],
]
found["configs"] = [
    repr(create_engine_config(parse(*spelling)).speculative_config) for spelling in spellings
]
config = parse(*spellings[0]).create_speculative_config(
    *(getattr(create_engine_config(parse()), name) for name in ("model_config", "parallel_config"))
)
SamplingParams(min_p=0.5)._validate_spec_decode(config)
found["tree"] = config.tree

config = create_engine_config(parse(*spellings[0]))
found["V2"] = config.use_v2_model_runner
found["ahead"] = config.scheduler_config.async_scheduling
found["schedule"] = config.speculative_config.num_speculative_tokens_per_batch_size
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
try:
    parse(*spellings[0]).create_engine_config()
except ValueError as error:
    found["refused by us"] = str(error).splitlines()
print("RESULT " + json.dumps(found))
"""


@pytest.mark.parametrize("version", NOT_INSTALLED)
def test_the_package_is_imported_and_configured(version, target, heads):
    found = run_against(source_of(version), CONFIGURE, target, heads)
    assert found["version"] == version
    assert found["not imported"] == {}
    config = f"SpeculativeConfig(method='medusa', model={str(heads)!r}, num_spec_tokens=3)"
    assert found["configs"] == [config] * 3
    assert len(found["tree"]) == 3
    # Nothing sends medusa to the V1 runner, or takes its schedule, or scheduling ahead, from it.
    assert found["V2"]
    assert found["ahead"]
    assert found["schedule"] == [[1, 1, 3]]
    # V1 is served with the release that it was tested with, and nothing else stands against it.
    _, reason, _ = found["refused by us"]
    assert reason.startswith(f"  - the V1 model runner of vLLM {version}: vllm-medusa serves V1")


def touched_files(diff: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", diff.read_text(), re.MULTILINE)


def apply(diff: Path, folder: Path, *options: str) -> None:
    # The ceiling: below a checkout, git would look for the files in that.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    result = subprocess.run(
        ["git", "apply", *options, str(diff)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_upstream_diff_applies(diff, tmp_path):
    source = source_of(diff.stem.removeprefix("upstream-"))
    assert touched_files(diff)
    for name in touched_files(diff):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, tmp_path / name)
    apply(diff, tmp_path, "--check")


METHOD = """
from typing import ClassVar
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

@config
class ToyConfig(SpeculativeConfig):
    supports_all_sampling_params: ClassVar[bool] = True
    toy: int = 0

    @classmethod
    def from_options(cls, toy, **options):
        return cls(toy=toy + 1, num_speculative_tokens=2, **options)

    def __post_init__(self):
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config

    def verify_with_vllm_config(self, vllm_config):
        self.toy = vllm_config.model_config.max_model_len

    def create_speculator(self, vllm_config, device, req_states):
        return ["speculator", device]

    def extend_model_state(self, cls):
        return type("Extended", (cls,), {})

    def extend_structured_output_manager(self, cls):
        return type("Following", (cls,), {})
"""

HOST = """
import json, sys
from vllm.config.speculative import register_speculative_method
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu import model_states, spec_decode

register_speculative_method("toy", "toy_method.ToyConfig")

class State:
    supports_prompt_embeds = True
    def __init__(self, *arguments): pass

model_states.resolve_model_state_cls = lambda *arguments: State

def config(**options):
    # Through the command line's parser, which knows vLLM's own methods.
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(
        ["--model", sys.argv[1], "--skip-tokenizer-init", "--max-model-len", "128"]
        + [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", value)]
    )
    return EngineArgs.from_cli_args(args).create_engine_config()

class Core(EngineCore):
    # Built up to the scheduler, which needs a worker.
    def _initialize_kv_caches(self, vllm_config): return None

def manager_of(vllm_config):
    core = Core.__new__(Core)
    try:
        core.__init__(vllm_config, lambda vllm_config: None, False)
    except AttributeError:
        return type(core.structured_output_manager).__name__

toy = config(spec_method="toy", speculative_config='{"toy": 6}')
plain = config()
ngram = config(spec_method="ngram", spec_tokens="2")
SamplingParams(min_p=0.5)._validate_spec_decode(toy.speculative_config)
try:
    SamplingParams(min_p=0.5)._validate_spec_decode(ngram.speculative_config)
except VLLMValidationError as error:
    refusal = str(error)
try:
    config(spec_method="unknown", spec_tokens="2")
except ValueError as error:
    unknown = str(error)
found = {
    "class": type(toy.speculative_config).__name__,
    "toy": toy.speculative_config.toy,
    "speculator": spec_decode.init_speculator(toy, "device", None),
    "state": type(model_states.init_model_state(toy, None, None, None)).__name__,
    "plain state": type(model_states.init_model_state(plain, None, None, None)).__name__,
    "grammars": manager_of(toy),
    "plain grammars": manager_of(plain),
    "other grammars": manager_of(ngram),
    "ngram": type(ngram.speculative_config).__name__,
    "refusal": refusal,
    "unknown": unknown,
}
print("RESULT " + json.dumps(found))
"""


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: diff.stem)
def test_upstream_diff_hosts_a_method_of_a_plugin(diff, target, tmp_path):
    version = diff.stem.removeprefix("upstream-")
    # With the compiled Python files: importing is several times faster.
    patched = tmp_path / "patched"
    shutil.copytree(
        source_of(version) / "vllm", patched / "vllm", ignore=shutil.ignore_patterns("*.so")
    )
    apply(diff, patched)
    (patched / "toy_method.py").write_text(METHOD)
    found = run_against(patched, HOST, target)
    assert found.pop("unknown").startswith("Unknown speculative method 'unknown'")
    assert "min_p" in found.pop("refusal")
    assert found == {
        "class": "ToyConfig",
        "toy": 128,
        "speculator": ["speculator", "device"],
        "state": "Extended",
        "plain state": "State",
        "grammars": "Following",
        "plain grammars": "StructuredOutputManager",
        "other grammars": "StructuredOutputManager",
        "ngram": "SpeculativeConfig",
    }
