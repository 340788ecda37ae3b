"""Seams: the places of vLLM that we rely on, with a fingerprint of each per supported release.

``patches/VERSION.json`` lists every seam: where, what we do there, why, when it can go, and the
SHA-256 of its upstream source. Sources are read, not imported: the check costs no import, and
works on a wheel that was only unpacked.
"""

import ast
import hashlib
import importlib.util
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

SEAM_MISMATCH = "VLLM_MEDUSA_SEAM_MISMATCH"


def manifest_folder() -> Path:
    """Where the manifests lie: in the wheel below the package, in a checkout beside it."""
    package = Path(__file__).parent
    installed = package / "patches"
    return installed if installed.is_dir() else package.parent / "patches"


def supported_versions() -> list[str]:
    """The vLLM releases that have a manifest."""
    return sorted(path.stem for path in manifest_folder().glob("*.json"))


def installed_release() -> str:
    """The installed vLLM's release, without its build: 0.32.0 of 0.32.0+cpu."""
    import vllm

    return vllm.__version__.split("+")[0]


def is_supported(version: str) -> bool:
    """Whether a release has a manifest."""
    return (manifest_folder() / f"{version}.json").is_file()


def read_manifest(version: str) -> list[dict[str, Any]]:
    """The seams of a release.

    Raises:
        RuntimeError: there is no manifest for it.
    """
    path = manifest_folder() / f"{version}.json"
    if not path.is_file():
        raise RuntimeError(
            f"vllm-medusa does not support vLLM {version}; it supports "
            f"{', '.join(supported_versions())}. Install one of these, or a newer vllm-medusa"
        )
    return json.loads(path.read_text())["seams"]


def seam_source(seam: str, root: Path) -> str | None:
    """A seam's source, from its first decorator to its end, in whole lines.

    Args:
        seam: ``package.module:qualified.name`` of a function, class, method or assigned name.
        root: the folder that holds the package ``vllm``.

    Returns:
        The text, or None if there is no such module or name.
    """
    module, _, name = seam.partition(":")
    folder = root.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not path.is_file():
        return None
    lines, node = _parse(path)
    for part in name.split("."):
        body = getattr(node, "body", ())
        node = next((child for child in body if part in _defined_names(child)), None)
        if node is None:
            return None
    # A class or function starts at its name; a decorator that changes matters as much.
    first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
    return "\n".join(lines[first - 1 : node.end_lineno])


def fingerprint(seam: str, root: Path) -> str | None:
    """SHA-256 of ``seam_source``, None where that is None."""
    source = seam_source(seam, root)
    return None if source is None else hashlib.sha256(source.encode()).hexdigest()


def _defined_names(node: ast.AST) -> list[str]:
    """The names that a statement defines: one for a function or class, any number for ``=``."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    name = getattr(node, "name", None)
    return [name] if isinstance(name, str) else []


@cache
def _parse(path: Path) -> tuple[list[str], Any]:
    """A module's lines, as its syntax tree counts them, and the tree; many seams lie in few, large
    modules."""
    source = path.read_text(encoding="utf-8")
    return source.split("\n"), ast.parse(source)


def differing_seams(version: str, root: Path) -> list[str]:
    """Names of the seams whose source is not the one we were tested with."""
    return [
        seam["name"]
        for seam in read_manifest(version)
        if fingerprint(seam["name"], root) != seam["sha256"]
    ]


def check_seams() -> None:
    """Compare the installed vLLM with the manifest of its release.

    Raises:
        RuntimeError: the release has no manifest, or seams differ. With
            ``VLLM_MEDUSA_SEAM_MISMATCH=warn`` differing seams are a warning only.
    """
    from vllm.logger import init_logger

    version = installed_release()
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    differing = differing_seams(version, Path(spec.origin).parent.parent)
    if not differing:
        return
    message = (
        f"the installed vLLM {version} differs from the release that vllm-medusa was "
        f"tested with, in: {', '.join(differing)}. Install the release unchanged, or set "
        f"{SEAM_MISMATCH}=warn to go on at your own risk"
    )
    if os.environ.get(SEAM_MISMATCH) != "warn":
        raise RuntimeError(message)
    init_logger(f"vllm.{__name__}").warning(message)
