"""What one machine has of what a Medusa worker needs; runs on every node of a cluster."""

import hashlib
from typing import NamedTuple

from vllm_medusa import __version__
from vllm_medusa.heads.files import CONFIG_FILE, find_files, resolve_heads
from vllm_medusa.heads.formats import HeadsError
from vllm_medusa.manifest import check_seams


class NodeReport(NamedTuple):
    """What a machine has."""

    plugin: str
    """Version of vllm-medusa."""
    vllm: str
    """Version of vLLM."""
    vllm_problem: str
    """Why its vLLM is not one we were tested with; empty if it is."""
    heads: dict[str, str]
    """SHA-256 of each file of the heads; empty if they cannot be read."""
    heads_problem: str
    """Why the heads cannot be read; empty if they can."""


def node_report(heads: str, revision: str | None) -> NodeReport:
    """Look at the machine this runs on.

    Args:
        heads: folder or hub id, as ``resolve_heads`` takes it.
        revision: of the hub id.
    """
    import vllm

    vllm_problem, heads_problem, digests = "", "", {}
    try:
        check_seams()
    except RuntimeError as error:
        vllm_problem = str(error)
    try:
        digests = heads_digests(heads, revision)
    except HeadsError as error:
        heads_problem = str(error)
    return NodeReport(__version__, vllm.__version__, vllm_problem, digests, heads_problem)


def heads_digests(heads: str, revision: str | None) -> dict[str, str]:
    """SHA-256 of each file that a worker loads, by name.

    Raises:
        HeadsError: the heads are not there, or a file cannot be read.
    """
    what = f'medusa heads "{heads}"'
    folder = resolve_heads(heads, revision)
    paths = find_files(what, folder).paths
    if (folder / CONFIG_FILE).is_file():
        paths = [*paths, folder / CONFIG_FILE]
    digests = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise HeadsError(f"{what}: {path.name}: cannot be read ({error})") from error
    return digests
