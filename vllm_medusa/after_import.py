"""Calling a function once a module has been imported, without importing it."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function as soon as a module is imported; at once if it is.

    vLLM loads plugins in every process. Those that do not need a large module should not pay for it
    because we wrap something in it.

    Args:
        name: of the module, such as ``package.module``.
        function: is called once, when the module's code has run.
    """
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Has Python find one module as ever, and a function called when it is loaded."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # the search below must not come here again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.function()

        loader.exec_module = exec_module
        return spec
