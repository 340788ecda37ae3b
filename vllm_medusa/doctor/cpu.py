"""vLLM on a CPU: libraries preloaded, threads bound, the type to compute in, the compiled kernel.

None of it keeps Medusa from working; without it a step takes up to several times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm_medusa.cpu_setup import (
    available_cores,
    core_ranges,
    cpu_environment,
    missing_helpers,
    preload_libraries,
)
from vllm_medusa.doctor.engine import Facts
from vllm_medusa.doctor.findings import OK, WARNING, Finding
from vllm_medusa.machine import cpu_model, has_bfloat16, instruction_sets

SECTION = "CPU"
SET_ENVIRONMENT = 'eval "$(python -m vllm_medusa.cpu_setup --print-env)"'
BUILD_KERNEL = "python -m vllm_medusa.attention.kernels"

BIND = "VLLM_CPU_OMP_THREADS_BIND"


def cpu_findings(facts: Facts) -> Iterator[Finding]:
    """What the machine and this shell's environment say, and whether the kernel is there."""
    cores = available_cores()
    sets = ", ".join(instruction_sets()) or "unknown"
    yield Finding(SECTION, "CPU", f"{cpu_model()}, {len(cores)} cores, instruction sets {sets}")
    for helper in missing_helpers():
        yield Finding(SECTION, helper.name, f"not found: {helper.effect}", WARNING, helper.remedy)
    yield _preloads()
    yield _threads(cores)
    yield _other_settings()
    yield _type()
    if (kernel := _kernel(facts)) is not None:
        yield kernel


def loaded_libraries() -> set[str]:
    """File names of the shared libraries in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(fields[5]).name for line in lines if len(fields := line.split(None, 5)) == 6}


def _preloads() -> Finding:
    """A program started from this shell has them if this one has."""
    wanted = [Path(path).name for path in preload_libraries()]
    loaded = loaded_libraries()
    missing = [name for name in wanted if name not in loaded]
    if missing:
        found = f"{', '.join(missing)} not preloaded (LD_PRELOAD): steps take longer"
        return Finding(SECTION, "preloads", found, WARNING, SET_ENVIRONMENT)
    return Finding(SECTION, "preloads", ", ".join(wanted) or "none to be had on this machine")


def _threads(cores: list[int]) -> Finding:
    """The cores that vLLM binds its workers' threads to."""
    setting = os.environ.get(BIND, "auto")
    if setting == "auto":
        found = f"{BIND} is not set: vLLM keeps a core of {len(cores)} back"
    elif setting == "nobind":
        found = f"{BIND}=nobind: threads move between cores, steps take longer"
    else:
        named = _cores_of(setting)
        outside = [] if named is None else sorted(named - set(cores))
        if named is None:
            found = f"{BIND}={setting!r} is no list of cores such as 0-3 or 0-1|2-3"
        elif outside:
            found = (
                f"{BIND}={setting} names cores that this process may not use: "
                f"{core_ranges(outside)} of {core_ranges(cores)}"
            )
        else:
            return Finding(SECTION, "threads", f"bound to {setting}", OK)
    return Finding(SECTION, "threads", found, WARNING, SET_ENVIRONMENT)


def _cores_of(setting: str) -> set[int] | None:
    """The cores of "0-1,4|2-3"; None if it is not of this form."""
    cores: set[int] = set()
    try:
        for part in setting.replace("|", ",").split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return None
    return cores


def _other_settings() -> Finding:
    """What else ``cpu_environment`` sets: whether it is set, not to what."""
    names = [name for name in cpu_environment() if name not in ("LD_PRELOAD", BIND)]
    missing = [name for name in names if name not in os.environ]
    if missing:
        found = f"{', '.join(missing)} not set"
        return Finding(SECTION, "environment", found, WARNING, SET_ENVIRONMENT)
    settings = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return Finding(SECTION, "environment", settings)


def _type() -> Finding:
    """Advice, not a fault: what to give as --dtype."""
    if has_bfloat16():
        advice = (
            "this CPU computes in bfloat16 (--dtype bfloat16); in float32 (--dtype float32) texts "
            "are token-identical to those without speculation"
        )
    else:
        advice = (
            "serve with --dtype float32: this CPU has no instructions for bfloat16, in which every "
            "row of a tree would cost as much as a whole step"
        )
    return Finding(SECTION, "dtype", advice)


def _kernel(facts: Facts) -> Finding | None:
    """The compiled kernel of tree attention."""
    if facts.values.get("platform") != "cpu":  # not asked, or vLLM cannot be imported
        return None
    if "kernel" in facts.errors:
        found = f"cannot be built, trees take 20 times longer: {facts.errors['kernel']}"
        return Finding(SECTION, "tree attention kernel", found, WARNING, BUILD_KERNEL)
    kernel = facts.values.get("kernel")
    if kernel is None:  # the process did not come to it
        return None
    state = "in the cache" if kernel["cached"] else "compiled just now into the cache"
    return Finding(SECTION, "tree attention kernel", f"{state}: {kernel['path']}")
