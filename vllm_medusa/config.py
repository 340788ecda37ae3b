"""Configuration: the string ``medusa:HEADS``, the options, and vLLM's speculative config for them.

All of these mean the same:

    vllm serve MODEL --speculative-model medusa:HEADS
    vllm serve MODEL --spec-model medusa:HEADS --spec-tokens 7
    vllm serve MODEL --spec-method medusa --spec-model HEADS
    vllm serve MODEL --speculative-config '{"method": "medusa", "model": "HEADS"}'
    LLM(MODEL, speculative_config={"method": "medusa", "model": "HEADS"})
"""

import functools
from pathlib import Path
from typing import Any, Literal

from vllm.config import ModelConfig, ParallelConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_medusa.heads.checkpoint import HeadsInfo, check_against_target, inspect_heads
from vllm_medusa.machine import differences
from vllm_medusa.options import PREFIX
from vllm_medusa.stored_tree import SCHEDULE, StoredTree, read_stored_tree
from vllm_medusa.tree import MAX_NODES, TREE_FILE, TokenTree, default_tree, read_tree
from vllm_medusa.typical import TypicalBars

logger = init_logger(f"vllm.{__name__}")

# Nodes of the default tree. On a CPU each row of a step costs time, on a GPU they are nearly free
# at low batch sizes; a calibrated tree beside the heads replaces both.
DEFAULT_NODES_CPU = 3
DEFAULT_NODES = 15

OPTIONS = {
    "method": 'always "medusa"',
    "model": "the heads: a folder or a hub id, with @REVISION if wanted",
    "revision": "revision of the heads on the hub",
    "num_speculative_tokens": "nodes to verify per request and step",
    "num_speculative_tokens_per_batch_size": "vLLM's schedule of nodes by batch size",
    "tree": 'rank paths such as [[0], [1], [0, 0]], a JSON file of them, or "chain"',
    "lookup": "whether to draft from the request's own text where it repeats itself, default true",
    "draft_sample_method": '"greedy" (drafts are the heads\' best tokens), "probabilistic" (drawn '
    'from the heads where a request samples) or "auto" (the default: drawn where a request samples '
    "at a temperature of 1 or more without a seed)",
    "rejection_sample_method": '"standard" (exact, the default) or "typical" (lossy)',
    "posterior_threshold": "with typical: the highest bar of a draft's probability, default 0.09",
    "posterior_alpha": "with typical: share of exp(-entropy) that is the bar, default 0.3",
}


@config
class MedusaSpeculativeConfig(SpeculativeConfig):
    """vLLM's ``SpeculativeConfig`` for Medusa heads with a token tree.

    ``num_speculative_tokens`` keeps vLLM's meaning, tokens scheduled for verification per request
    and step: the number of tree nodes without the root.
    """

    method: Literal["medusa"] = "medusa"
    """Since 0.33 vLLM's own list of methods has no Medusa."""

    tree: list[list[int]] | None = None
    """The tree as rank paths in nested order."""

    lookup: bool = True
    """Where a request's text repeats itself, verify a chain of what came behind it before, in the
    tree's place (``lookup.py``)."""

    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"
    """Which requests' drafts are drawn from the heads, and not their best tokens
    (``sampled_drafts.py``)."""

    rejection_sample_method: Literal["standard", "typical"] = "standard"
    """What is accepted: "standard", tokens drawn from the target only (``acceptance.py``), or
    "typical", likely drafts too, which is lossy (``typical.py``)."""

    posterior_threshold: float = TypicalBars().threshold
    posterior_alpha: float = TypicalBars().alpha

    def __post_init__(self) -> None:
        # The parent's __post_init__ builds a ModelConfig for a draft model; heads are none. Like
        # its own "ngram" and "custom_class" methods we let the target's configs stand for the
        # draft's.
        self.prompt_lookup_max = 0
        self.prompt_lookup_min = 0
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size

    # Cached: it is asked for in every step, and asking is how others tell our config from vLLM's.
    @functools.cached_property
    def token_tree(self) -> TokenTree:
        """The tree that is verified."""
        assert self.tree is not None
        return TokenTree(tuple(tuple(path) for path in self.tree))

    @property
    def typical_bars(self) -> TypicalBars | None:
        """What drafts have to pass with typical acceptance; None: acceptance is exact."""
        if self.rejection_sample_method != "typical":
            return None
        return TypicalBars(self.posterior_threshold, self.posterior_alpha)

    def __repr__(self) -> str:
        return (
            f"SpeculativeConfig(method='medusa', model={self.model!r}, "
            f"num_spec_tokens={self.num_speculative_tokens})"
        )


def speculative_config_from_options(
    options: dict[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> MedusaSpeculativeConfig:
    """Check the options and build the config.

    Raises:
        ValueError: an unknown option, no heads, heads that do not fit, a tree that cannot be used.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        known = "; ".join(f"{key} ({meaning})" for key, meaning in OPTIONS.items())
        raise ValueError(
            f"speculative_config with method 'medusa' does not take {', '.join(unknown)}. "
            f"It takes: {known}"
        )
    method = options.get("method", "medusa")
    if method != "medusa":
        raise ValueError(
            f"the speculative model {options['model']!r} asks for medusa, but the method is "
            f"{method!r}: leave the method out, or give the heads without '{PREFIX}'"
        )
    heads = options.get("model")
    if not isinstance(heads, str | Path) or not str(heads).removeprefix(PREFIX):
        raise ValueError(
            f"medusa needs heads, found model={heads!r}: give a folder or a hub id, such as "
            f"--speculative-model {PREFIX}FOLDER"
        )
    heads = str(heads).removeprefix(PREFIX)
    if (folder := Path(heads).expanduser()).is_dir():
        # Workers may have another working folder, and other users.
        heads = str(folder.absolute())
    if not isinstance(options.get("lookup", True), bool):
        raise ValueError(f"lookup is {options['lookup']!r}: expected true or false")
    _check_acceptance(options)
    if options.get("rejection_sample_method") == "typical":
        options = options | {"draft_sample_method": "greedy"}
    # All checks come before the config is built: its own errors would be wrapped by pydantic's.
    info = inspect_heads(heads, options.get("revision"))
    for warning in info.warnings:
        logger.warning_once("medusa heads %s: %s", heads, warning)
    vocab_size = target_model_config.get_vocab_size()
    check_against_target(
        info,
        hidden_size=target_model_config.get_hidden_size(),
        vocab_size=vocab_size,
        target=target_model_config.model,
    )
    tree, schedule = _choose_tree(options, info, target_model_config.model)
    tree.check_fits(info.num_heads, info.draft_vocab_size or vocab_size, f"medusa heads {heads}")
    if schedule is None:
        # The same at every batch size. Said to vLLM as a schedule, because without one its
        # scheduler pads requests that have one token to read with placeholder drafts, for CUDA
        # graphs' sake: rows computed for nothing, and with a small token budget it never schedules
        # them.
        schedule = [[1, 1, len(tree)]]
    _check_schedule(schedule, len(tree))
    chosen = {
        "method": "medusa",
        "model": heads,
        "tree": [list(path) for path in tree.paths],
        "num_speculative_tokens": len(tree),
        "num_speculative_tokens_per_batch_size": schedule,
    }
    return MedusaSpeculativeConfig(
        **options | chosen,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
    )


def _check_acceptance(options: dict[str, Any]) -> None:
    """Refuse options of acceptance that have no meaning; warn of a lossy one."""
    method = options.get("rejection_sample_method", "standard")
    if method not in ("standard", "typical"):
        raise ValueError(
            f"rejection_sample_method is {method!r}: medusa takes 'standard' (exact) and 'typical' "
            "(lossy)"
        )
    for name in ("posterior_threshold", "posterior_alpha"):
        if name not in options:
            continue
        if method != "typical":
            raise ValueError(
                f"{name} counts with rejection_sample_method 'typical' only: leave it out, or add "
                "that"
            )
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"{name} is {value!r}: expected a number above 0, at most 1")
    drafts = options.get("draft_sample_method", "auto")
    if drafts not in ("auto", "greedy", "probabilistic"):
        raise ValueError(
            f"draft_sample_method is {drafts!r}: expected 'greedy' (the heads' best tokens), "
            "'probabilistic' (drawn from the heads) or 'auto' (drawn where that pays)"
        )
    if drafts == "probabilistic" and method == "typical":
        raise ValueError(
            "draft_sample_method 'probabilistic' has an exact rule of its own: leave "
            "rejection_sample_method 'typical' out, or draft with 'greedy'"
        )
    if method == "typical":
        logger.warning_once(
            "Medusa: typical acceptance is lossy. Sampled texts no longer follow the target's "
            "distribution; greedy ones stay exact. Leave rejection_sample_method out to be exact."
        )


def _choose_tree(options: dict[str, Any], info: HeadsInfo, target: str) -> tuple[TokenTree, Any]:
    """The tree of the options, else the one stored beside the heads, else the default one; and the
    schedule of nodes by batch size of the options, else the stored one, else None.

    A stored schedule counts only where the options say nothing about the tree.
    """
    nodes = options.get("num_speculative_tokens")
    if nodes is not None and (type(nodes) is not int or not 1 <= nodes <= MAX_NODES):
        raise ValueError(
            f"num_speculative_tokens is {nodes!r}: medusa verifies 1 to {MAX_NODES} nodes per "
            "request and step (vLLM's limit is 128 tokens with the root)"
        )
    schedule = options.get(SCHEDULE)
    file = info.path / TREE_FILE
    if options.get("tree") is not None:
        tree, origin = read_tree(options["tree"], info.num_heads, nodes), "the option tree"
    elif file.is_file():
        stored = read_stored_tree(file, info.num_heads)
        tree, origin = stored.tree, str(file)
        if nodes is None and schedule is None:
            # vLLM wants room for one node even where the schedule never asks for any.
            nodes, schedule = max(stored.most_nodes, 1), stored.schedule
            _warn_of_another_machine(stored, file, target, info.source)
        elif nodes is None:
            parsed = validate_and_normalize_dynamic_sd_schedule(schedule)
            nodes = min(len(tree), max(1, *(entry[2] for entry in parsed)))
    else:
        default = DEFAULT_NODES_CPU if current_platform.is_cpu() else DEFAULT_NODES
        tree, origin = default_tree(info.num_heads, nodes or default), "the default tree"
    if nodes is not None and nodes > len(tree):
        raise ValueError(
            f"num_speculative_tokens asks for {nodes} nodes, but {origin} holds {len(tree)}: "
            "ask for fewer, or give a larger tree with the option tree"
        )
    tree = tree.prefix(nodes or len(tree))
    logger.info_once(
        "Medusa: %d heads (%s) from %s, %d nodes of depth %d from %s.",
        info.num_heads, info.format, info.source, len(tree), tree.depth, origin,
    )  # fmt: skip
    return tree, schedule


def _warn_of_another_machine(stored: StoredTree, file: Path, target: str, heads: str) -> None:
    """Say so where the tree was chosen for another machine or another vLLM."""
    if found := differences(stored.machine, stored.versions):
        logger.warning_once(
            "The tree in %s was chosen elsewhere (%s) and may not be the best one here. "
            "To choose it anew: vllm-medusa calibrate %s %s",
            file, "; ".join(found), target, heads,
        )  # fmt: skip


def _check_schedule(schedule: Any, num_nodes: int) -> None:
    """Refuse a batch-size schedule here that vLLM's scheduler would refuse after loading."""
    for start, end, nodes in validate_and_normalize_dynamic_sd_schedule(schedule):
        if nodes > num_nodes:
            raise ValueError(
                f"num_speculative_tokens_per_batch_size asks for {nodes} nodes at batch sizes "
                f"{start} to {end}, but the tree holds {num_nodes}"
            )
