"""The LM head of a target model, read from its safetensors files without building the model."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllm_medusa.heads.files import CONFIG_FILE, read_json
from vllm_medusa.heads.formats import HeadsError
from vllm_medusa.heads.layout import FLOAT_DTYPES

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


def read_target_lm_head(model: str) -> torch.Tensor:
    """The weight of the LM head, [vocabulary, hidden], as stored.

    Args:
        model: A folder, or a hub id with or without ``@revision``; of the hub's files only those
            are fetched that the LM head may be in.

    Raises:
        HeadsError: Not there, or the LM head is more than a plain weight.
    """
    what = f'target "{model}"'
    folder = Path(os.path.expanduser(model))
    if not folder.is_dir():
        folder = _fetch(what, model)
    stored: dict[str, Path] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt", device="cpu") as file:
                stored |= dict.fromkeys(file.keys(), path)
        name = _choose(what, folder, stored)
        with safe_open(stored[name], framework="pt", device="cpu") as file:
            weight = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise HeadsError(f"{what}: cannot be read ({error})") from error
    if weight.ndim != 2 or weight.dtype not in FLOAT_DTYPES:
        raise HeadsError(
            f"{what}: {name} is {weight.dtype} {list(weight.shape)}, expected a matrix of floats: "
            "give the target before it was quantised"
        )
    return weight


def _choose(what: str, folder: Path, stored: dict[str, Path]) -> str:
    """The name of the tensor that is the LM head."""
    config_file = folder / CONFIG_FILE
    config = read_json(what, config_file) if config_file.is_file() else {}
    tied = config.get("tie_word_embeddings")
    more = sorted(name for name in stored if name.startswith("lm_head.") and name != LM_HEAD)
    if more:
        raise HeadsError(
            f"{what}: its LM head is more than a weight ({', '.join(more)}), which heads cannot be"
        )
    if LM_HEAD in stored and not (tied is True and EMBEDDING in stored):
        return LM_HEAD
    # A complete checkpoint without an LM head is one whose embedding is the LM head too.
    if EMBEDDING in stored and tied is not False:
        return EMBEDDING
    raise HeadsError(
        f"{what}: no LM head among the {len(stored)} tensors of its safetensors files in "
        f'"{folder}". Looked for {LM_HEAD} and, in a target with tied embeddings, {EMBEDDING}.'
    )


def _fetch(what: str, model: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = model.partition("@")
    try:
        folder = Path(
            snapshot_download(repo, revision=revision or None, allow_patterns=[CONFIG_FILE, _INDEX])
        )
        files = ["*.safetensors"]
        if (folder / _INDEX).is_file():
            weight_map = read_json(what, folder / _INDEX).get("weight_map", {})
            files = sorted(
                {file for name, file in weight_map.items() if name in (LM_HEAD, EMBEDDING)}
            )
        return Path(
            snapshot_download(
                repo, revision=revision or None, allow_patterns=[CONFIG_FILE, _INDEX, *files]
            )
        )
    # Everything, as in ``resolve_heads``: what comes out depends on the hub client's version.
    except Exception as error:
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise HeadsError(
            f"{what}: not a folder here, and not to be had from the hub ({reason})"
        ) from error
