"""``vllm-medusa calibrate``: from heads to the tree that serving uses, in the order it happens."""

from __future__ import annotations

import contextlib
import json
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.bench.environment import compile_environment
from vllm_medusa.calibration.cost import BatchCost, CostOptions, measure_costs
from vllm_medusa.calibration.cost_file import COSTS_FILE, read_costs, save_costs
from vllm_medusa.calibration.errors import CalibrationError
from vllm_medusa.calibration.growth import accuracies, grow_tree, head_counts, rank_counts
from vllm_medusa.calibration.picture import draw
from vllm_medusa.calibration.ranks_file import RANKS_FILE, RankPaths, check_ranks, read_ranks
from vllm_medusa.calibration.record import Calibration, to_json, to_table
from vllm_medusa.calibration.replay import tokens_per_step
from vllm_medusa.calibration.schedule import MIN_GAIN
from vllm_medusa.heads.checkpoint import HeadsInfo, check_against_target, inspect_heads
from vllm_medusa.machine import these_versions, this_machine
from vllm_medusa.paths import cache_folder
from vllm_medusa.stage_process import run_stage
from vllm_medusa.stored_tree import SCHEDULE
from vllm_medusa.tree import TREE_FILE
from vllm_medusa.whole_file import make_writable, write_whole

PICTURE = Path(TREE_FILE).with_suffix(".png").name


@dataclass(frozen=True)
class CalibrateOptions:
    """What the command line says.

    Attributes:
        model: the target, folder or hub id.
        heads: folder or hub id of the heads, with revision if wanted.
        output: folder for the results; None: the heads' folder, which must be one of the user's.
        data: prompts to measure the heads anew; None: the ranks stored beside the heads.
        chat_template: the text of a template for the data, for a model without one.
        max_prompts: of the data, so many are used.
        num_nodes: size of the tree that is written.
        min_gain: a tree must promise as much.
        fresh: forget what a killed run has measured.
        cost: how the cost is measured.
    """

    model: str
    heads: str
    revision: str | None = None
    output: Path | None = None
    data: Path | None = None
    chat_template: str | None = None
    max_prompts: int = 200
    num_nodes: int = 63
    min_gain: float = MIN_GAIN
    fresh: bool = False
    cost: CostOptions = field(default_factory=CostOptions)


def calibrate(console: Console, options: CalibrateOptions) -> Path:
    """Measure, choose, write and show. Returns the file written.

    Raises:
        CalibrationError, HeadsError, OSError: bad input, before the long work.
        StageError: an engine failed.
    """
    info = inspect_heads(options.heads, options.revision)
    vocab_size = _check_fits(info, options.model)
    output = _prepare_output(info, options)
    work = _work_folder(info, options)
    paths = _rank_paths(console, info, work, options)

    counts = rank_counts(paths)
    num_ranks = info.draft_vocab_size or vocab_size
    tree = grow_tree(counts, info.num_heads, options.num_nodes, num_ranks)
    tokens = tokens_per_step(paths, tree)
    console.print(
        f"{len(tree)} nodes grown from {sum(map(len, paths))} positions of {len(paths)} answers; "
        f"with all of them {tokens[-1]:.2f} tokens per step"
    )
    about = {
        "model": Path(options.model).name if Path(options.model).exists() else options.model,
        "machine": this_machine(),
        "versions": these_versions(),
        "compiled": not options.cost.eager,
        "max_num_seqs": options.cost.max_num_seqs,
        "context": options.cost.context,
    }
    settings = about | {
        "cost": asdict(options.cost),
        "heads": [str(info.path), [(info.path / file).stat().st_mtime for file in info.files]],
        "paths": [list(path) for path in tree.paths],
        "tokens": tokens,
    }
    engine, costs = _measure(console, info, options, work, settings)
    result = Calibration(
        tree,
        accuracies(head_counts(counts, info.num_heads)),
        tokens,
        len(paths),
        sum(map(len, paths)),
        costs,
        about | engine,
        options.min_gain,
    )
    file = output / TREE_FILE
    write_whole(file, to_json(result))
    # Only what a killed run would need again.
    (work / COSTS_FILE).unlink(missing_ok=True)
    _show(console, result, file, info, is_beside_heads=output == info.path)
    return file


def _check_fits(info: HeadsInfo, model: str) -> int:
    """Refuse heads of another target; returns the target's vocabulary size."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(model).get_text_config()
    check_against_target(
        info, hidden_size=text.hidden_size, vocab_size=text.vocab_size, target=model
    )
    return int(text.vocab_size)


def _prepare_output(info: HeadsInfo, options: CalibrateOptions) -> Path:
    """The folder for the results, made and seen to be writable."""
    output = options.output or info.path
    if options.output is None and not Path(info.source).expanduser().is_dir():
        raise CalibrationError(
            f"{info.source} is on the hub, its copy here is no place for results: "
            "give a folder with --output"
        )
    try:
        make_writable(output)
    except OSError as error:
        advice = "give a folder with --output" if options.output is None else "give another folder"
        raise CalibrationError(f"{output} cannot be written ({error}): {advice}") from error
    return output


def _work_folder(info: HeadsInfo, options: CalibrateOptions) -> Path:
    """Where a killed run finds what it had; not beside the heads, which may be given to others."""
    name = zlib.crc32(f"{options.model} {info.path.resolve()}".encode())
    work = cache_folder() / "calibration" / f"{info.path.name}-{name:08x}"
    if options.fresh:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    return work


def _rank_paths(
    console: Console, info: HeadsInfo, work: Path, options: CalibrateOptions
) -> RankPaths:
    """How well the heads do on held-out text: as stored, or measured on the data."""
    if options.data is None:
        paths, where = read_ranks(info.path), str(info.path / RANKS_FILE)
    else:
        from vllm_medusa.calibration.ranks import measure_ranks

        paths = measure_ranks(
            console,
            options.model,
            info.path,
            options.data,
            work,
            options.max_prompts,
            dtype=options.cost.dtype,
            chat_template=options.chat_template,
        )
        where = f"what was measured on {options.data}"
    check_ranks(paths, info.num_heads, where)
    return paths


def _measure(
    console: Console,
    info: HeadsInfo,
    options: CalibrateOptions,
    work: Path,
    settings: dict[str, Any],
) -> tuple[dict[str, Any], Sequence[BatchCost]]:
    """What the engine is, and the cost curve at every batch size; what is in the work file is not
    measured again."""
    engine, costs = read_costs(work, settings)
    if costs:
        known = ", ".join(str(cost.batch_size) for cost in costs)
        console.print(f"cost at batch size {known}: measured before (--fresh measures again)")
    done = {cost.batch_size for cost in costs}
    todo = [size for size in options.cost.batch_sizes() if size not in done]
    if not todo:
        return engine, costs
    console.print(f"cost of a step at batch size {', '.join(map(str, todo))}: starting the engine")
    stage = run_stage(
        measure_costs,
        options.model,
        str(info.path),
        settings["paths"],
        settings["tokens"],
        todo,
        options.cost,
        log=work / "cost.log",
        environment=compile_environment(),
    )
    # Closed on every way out: that ends the process.
    with contextlib.closing(stage):  # type: ignore[type-var]
        for report in stage:
            if isinstance(report, dict):
                engine = report
                continue
            costs.append(report)
            save_costs(work, settings, engine, costs)
            shown = ", ".join(f"{size.nodes}: {1e3 * size.step:.1f}" for size in report.sizes)
            console.print(f"batch size {report.batch_size}, ms by nodes: {shown}")
    return engine, costs


def _show(
    console: Console, result: Calibration, file: Path, info: HeadsInfo, *, is_beside_heads: bool
) -> None:
    """Table, picture, and how to serve with it."""
    console.print(to_table(result))
    if disturbed := result.disturbed():
        console.print(
            "Other processes were busy at batch size "
            f"{', '.join(map(str, disturbed))}: measure again when the machine is idle.",
            style="yellow",
        )
    picture = file.with_name(PICTURE)
    try:
        draw(result, picture)
    except ModuleNotFoundError as error:
        console.print(f"no picture ({error}): pip install matplotlib", style="yellow")
    else:
        console.print(f"picture: {picture}", soft_wrap=True)
    console.print(f"written: {file}", soft_wrap=True)
    if is_beside_heads:
        console.print("vllm serve uses it by itself.")
        return
    config = {
        "method": "medusa",
        "model": info.source,
        "tree": str(file),
        "num_speculative_tokens": max(1, *result.sizes().values()),
        SCHEDULE: result.schedule(),
    }
    console.print(
        f"To serve with it: copy it beside the heads, or --speculative-config "
        f"'{json.dumps(config)}'",
        soft_wrap=True,
        markup=False,
    )
