"""On what a calibration was made: a tree chosen elsewhere may not be the best one here."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from vllm_medusa.cpu_setup import available_cores
from vllm_medusa.demo.machine import cpu_model, instruction_sets


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
