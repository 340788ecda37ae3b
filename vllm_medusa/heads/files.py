"""Where Medusa heads are and how their files are read: folders, the hub, safetensors, ``.pt``."""

import json
import os
import pickle
import re
import zipfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_medusa.heads.formats import (
    HeadsError,
    StoredTensor,
    drop_target_tensors,
    raise_problems,
)
from vllm_medusa.tree import TREE_FILE

CONFIG_FILE = "config.json"
HEADS_FILE = "medusa_lm_head"  # the stem that Medusa itself uses
_INDEX = ".safetensors.index.json"
# Not *.bin: a Medusa 1.0 repository may hold the whole target a second time as .bin files.
HUB_PATTERNS = (CONFIG_FILE, TREE_FILE, "*.safetensors", "*" + _INDEX, "*.pt")
LOOKED_FOR = (
    f"{HEADS_FILE}.safetensors, {HEADS_FILE}*{_INDEX}, {HEADS_FILE}-*.safetensors, "
    f"{HEADS_FILE}.pt, *{_INDEX}, *.safetensors, a single *.pt"
)
_SHARD = re.compile(r"(.*)-(\d{1,5})-of-(\d{1,5})\.safetensors")
# What a trainer leaves beside a checkpoint, this project's own among them.
_NOT_HEADS = re.compile(
    r"(optimizer|scheduler|scaler|rng_state.*|training_args)\.pt|medusa_ranks\.safetensors"
)

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class Files:
    """The files of one checkpoint.

    ``names`` maps tensor names to files where an index lists them, else it is None.
    """

    paths: list[Path]
    names: dict[str, Path] | None = None


def resolve_heads(heads: str, revision: str | None = None) -> Path:
    """The folder of heads given as a folder or as a hub id.

    Args:
        heads: A folder, or ``owner/name`` or ``owner/name@revision`` on the hub. A folder that
            exists wins, also when its name contains ``@``.
        revision: Branch, tag or commit on the hub; has no meaning for a folder.

    Returns:
        The folder, on the hub's side the local snapshot. Only heads, their config and their tree
        are fetched; with ``HF_HUB_OFFLINE`` set, only from the local cache.

    Raises:
        HeadsError: Not there, says why and what to give instead.
    """
    what = f'medusa heads "{heads}"'
    give = (
        f"Give a folder that holds {CONFIG_FILE} and {HEADS_FILE}.safetensors, or a hub id such as "
        "owner/name or owner/name@revision."
    )
    if not heads.strip():
        raise HeadsError(f"{what}: empty. {give}")
    path = Path(os.path.expanduser(heads))
    if path.is_dir():
        return path
    if path.is_file():
        raise HeadsError(f'{what}: a file. Give the folder that holds it: "{path.parent}".')
    repo, _, in_name = heads.partition("@")
    if in_name and revision and in_name != revision:
        raise HeadsError(
            f'{what}: the id asks for revision "{in_name}", revision= for "{revision}"'
        )
    if repo.startswith((".", "/", "~")) or repo.count("/") > 1:
        raise HeadsError(f"{what}: no such folder, and not a hub id. {give}")

    from huggingface_hub import snapshot_download

    try:
        snapshot = snapshot_download(
            repo, revision=in_name or revision or None, allow_patterns=list(HUB_PATTERNS)
        )
    # Everything: which errors come out (its own, the HTTP library's, OSError) depends on the hub
    # client's version, and for the user all of them mean the same.
    except Exception as error:
        # The hub's messages have the status and a request id first, the reason further down.
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        at = f' at revision "{revision}"' if revision and not in_name else ""
        raise HeadsError(
            f"{what}: not a folder here, and not to be had from the hub{at} ({reason}). {give}"
        ) from error
    return Path(snapshot)


def find_files(what: str, folder: Path) -> Files:
    """The files that hold the heads; those named after Medusa before any other.

    Raises:
        HeadsError: None, an incomplete set of shards, or several sets to choose from.
    """
    try:
        holds = sorted(folder.iterdir())
    except OSError as error:
        raise HeadsError(f'{what}: the folder "{folder}" cannot be read ({error})') from error
    present = [path for path in holds if path.is_file() and not _NOT_HEADS.fullmatch(path.name)]
    named = [path for path in present if path.name.startswith(HEADS_FILE)]
    for candidates in (named, present):
        single = [path for path in candidates if path.name == f"{HEADS_FILE}.safetensors"]
        if single:
            return Files(single)
        index = [path for path in candidates if path.name.endswith(_INDEX)]
        if len(index) > 1:
            names = ", ".join(path.name for path in index)
            raise HeadsError(
                f"{what}: several indexes ({names}): leave one, or name it {HEADS_FILE}"
            )
        if index:
            return _read_index(what, index[0])
        shards = [path for path in candidates if path.suffix == ".safetensors"]
        if shards:
            _check_shards_complete(what, shards)
            return Files(shards)
        pickles = [path for path in candidates if path.suffix == ".pt"]
        pickles = [path for path in pickles if path.stem == HEADS_FILE] or pickles
        if len(pickles) > 1:
            names = ", ".join(path.name for path in pickles)
            raise HeadsError(f"{what}: several .pt files ({names}): name one {HEADS_FILE}.pt")
        if pickles:
            return Files(pickles)
    names = ", ".join(path.name for path in holds) or "nothing"
    raise HeadsError(
        f'{what}: no heads in "{folder}". Looked for {LOOKED_FOR}. The folder holds: {names}.'
    )


def _read_index(what: str, index: Path) -> Files:
    """Files by an index; of a target's checkpoint only those that hold heads."""
    weight_map = read_json(what, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeadsError(f"{what}: {index.name}: no weight_map that maps tensors to files")
    kept, _ = drop_target_tensors(weight_map)
    names: dict[str, Path] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise HeadsError(f"{what}: {index.name}: {name}: {file!r} is not the name of a file")
        names[name] = index.parent / file
    paths = sorted({names[name] for name in kept})
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise HeadsError(f"{what}: {index.name} names files that are missing: {', '.join(missing)}")
    return Files(paths, names)


def _check_shards_complete(what: str, shards: list[Path]) -> None:
    """Shards that count themselves (x-00002-of-00003) must all be there."""
    names = {path.name for path in shards}
    missing = set()
    for match in filter(None, map(_SHARD.fullmatch, sorted(names))):
        stem, digits, of = match[1], len(match[2]), match[3]
        every = {f"{stem}-{i:0{digits}}-of-{of}.safetensors" for i in range(1, int(of) + 1)}
        missing |= every - names
    if missing:
        raise HeadsError(f"{what}: shards are missing: {', '.join(sorted(missing))}")


def read_json(what: str, path: Path) -> dict[str, Any]:
    """A JSON object; HeadsError if the file is anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HeadsError(f"{what}: {path.name}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise HeadsError(f"{what}: {path.name}: expected an object, found {type(content).__name__}")
    return content


class TensorReader:
    """Tensors of a checkpoint by name, each read when asked for. A context manager.

    Entering reads the headers of safetensors files only; ``.pt`` files are mapped into memory where
    their format allows it. ``tensors`` then describes every tensor but those of a target, of which
    ``num_target_tensors`` were passed over.

    Raises:
        HeadsError: On entering: an unreadable file, a ``.pt`` file that is more than tensors, a
            tensor stored twice, or an index that disagrees with its files.
    """

    def __init__(self, what: str, files: Files) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.num_target_tensors = 0
        self._what = what
        self._files = files
        self._sources: dict[Path, Any] = {}  # a safe_open handle, or a dict of tensors
        self._stack = ExitStack()

    def __enter__(self) -> "TensorReader":
        try:
            self._read_headers()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    def read(self, tensor: StoredTensor, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or these rows of it. May be a view of the mapped file: copy, don't write."""
        source = self._sources[tensor.file]
        if isinstance(source, dict):
            return source[tensor.name] if rows is None else source[tensor.name][rows]
        if rows is None:
            return source.get_tensor(tensor.name)
        return source.get_slice(tensor.name)[rows]

    def _close(self) -> None:
        self._sources.clear()
        self._stack.close()

    def _read_headers(self) -> None:
        stored = [tensor for path in self._files.paths for tensor in self._open(path)]
        in_index = self._files.names or {}
        names = dict.fromkeys([*in_index, *(tensor.name for tensor in stored)])
        kept, self.num_target_tensors = drop_target_tensors(names)
        for tensor in stored:
            if tensor.name not in kept:
                continue
            if tensor.name in self.tensors:
                raise HeadsError(
                    f"{self._what}: {tensor.name} is in both {self.tensors[tensor.name].file.name} "
                    f"and {tensor.file.name}"
                )
            self.tensors[tensor.name] = tensor
        lacking = [
            f"{file.name}: {name}: in the index, but not in the file"
            for name, file in in_index.items()
            if name in kept and name not in self.tensors
        ]
        raise_problems(self._what, lacking)

    def _open(self, path: Path) -> list[StoredTensor]:
        if path.suffix == ".pt":
            return self._open_pt(path)
        tensors = []
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in file.keys():  # noqa: SIM118 (a safe_open handle is no dict)
                header = file.get_slice(name)
                dtype_name = header.get_dtype()
                dtype = _SAFETENSORS_DTYPES.get(dtype_name)
                shape = tuple(header.get_shape())
                tensors.append(StoredTensor(name, path, shape, dtype, dtype_name))
        except (SafetensorError, OSError) as error:
            raise self._unreadable(path, error) from error
        self._sources[path] = file
        return tensors

    def _open_pt(self, path: Path) -> list[StoredTensor]:
        try:
            content = _load_pt(path)
        except pickle.UnpicklingError as error:
            raise HeadsError(
                f"{self._what}: {path.name}: not loaded, as it is not plain tensors but a pickle "
                "that could run code, or damaged. Save the state_dict of the heads alone, as "
                f"safetensors if you can. ({_first_line(error)})"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            raise self._unreadable(path, error) from error
        if not isinstance(content, dict):
            found = type(content).__name__
            raise HeadsError(f"{self._what}: {path.name}: expected a state_dict, found {found}")
        tensors, problems = [], []
        for name, value in content.items():
            if not isinstance(value, torch.Tensor):
                found = type(value).__name__
                problems.append(f"{path.name}: {name}: expected a tensor, found {found}")
            elif value.layout != torch.strided:
                problems.append(f"{path.name}: {name}: {value.layout} tensor, expected a dense one")
            else:
                dtype_name = str(value.dtype).removeprefix("torch.")
                shape = tuple(value.shape)
                tensors.append(StoredTensor(str(name), path, shape, value.dtype, dtype_name))
        raise_problems(self._what, problems)
        self._sources[path] = content
        return tensors

    def _unreadable(self, path: Path, error: Exception) -> HeadsError:
        hint = ""
        if path.is_file() and path.stat().st_size < 1024:
            with path.open("rb") as file:
                if file.read(64).startswith(b"version https://git-lfs"):
                    hint = ". It is a Git LFS pointer, not the file itself: run git lfs pull"
        return HeadsError(
            f"{self._what}: {path.name}: cannot be read, truncated or damaged? "
            f"({_first_line(error)}){hint}"
        )


def _load_pt(path: Path) -> Any:
    # weights_only: loading a pickle runs code. mmap: files from before torch 1.6 are no zip files.
    mmap = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
