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


def is_supported(version: str) -> bool:
    """Whether a release (``vllm.__version__``) has a manifest."""
    return (manifest_folder() / f"{version.split('+')[0]}.json").is_file()


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


def fingerprint(seam: str, root: Path) -> str | None:
    """SHA-256 of a seam's source.

    Args:
        seam: ``package.module:qualified.name``.
        root: the folder that holds the package ``vllm``.

    Returns:
        The digest, or None if there is no such module or name.
    """
    module, _, name = seam.partition(":")
    folder = root.joinpath(*module.split("."))
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not path.is_file():
        return None
    lines, scope = _parse(path)
    for part in name.split("."):
        scope = next((node for node in scope.body if getattr(node, "name", None) == part), None)
        if scope is None:
            return None
    # What ast.get_source_segment returns, which splits the whole file anew for each name.
    segment = lines[scope.lineno - 1 : scope.end_lineno]
    segment[-1] = segment[-1][: scope.end_col_offset]
    segment[0] = segment[0][scope.col_offset :]
    return hashlib.sha256(b"\n".join(segment)).hexdigest()


@cache
def _parse(path: Path) -> tuple[list[bytes], Any]:
    """A module's lines and its syntax tree; many seams lie in few, large modules."""
    source = path.read_text()
    return source.encode().split(b"\n"), ast.parse(source)


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
    import vllm
    from vllm.logger import init_logger

    version = vllm.__version__.split("+")[0]
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    differing = differing_seams(version, Path(spec.origin).parent.parent)
    if not differing:
        return
    message = (
        f"the installed vLLM {vllm.__version__} differs from the release that vllm-medusa was "
        f"tested with, in: {', '.join(differing)}. Install the release unchanged, or set "
        f"{SEAM_MISMATCH}=warn to go on at your own risk"
    )
    if os.environ.get(SEAM_MISMATCH) != "warn":
        raise RuntimeError(message)
    init_logger(f"vllm.{__name__}").warning(message)
