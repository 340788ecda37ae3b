"""A stand-in for what these tests' machine lacks: accelerators, and nodes that differ.

Python imports this module first thing in every process that has its folder in PYTHONPATH.

- vLLM refuses to run Ray workers on CPUs (``CpuPlatform.ray_device_key`` is empty). With the key of
  GPUs it places its CPU workers on nodes that were started with ``num_gpus``, which are declared
  and not there.
- The nodes of a test's cluster are processes of one machine, with one set of packages. A node whose
  environment names packages in TEST_RAY_MISSING_PACKAGES cannot import them.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

PLATFORM = "vllm.platforms.cpu"


class DeclaredDevices(MetaPathFinder):
    """Sets the device key once vLLM's CPU platform is imported."""

    def find_spec(self, name, path, target=None):
        if name != PLATFORM:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec


class MissingPackages(MetaPathFinder):
    """Hides packages."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, DeclaredDevices())
if missing := os.environ.get("TEST_RAY_MISSING_PACKAGES"):
    sys.meta_path.insert(0, MissingPackages(missing.split(",")))
