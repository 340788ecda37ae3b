"""What a decoding step costs on this machine, by batch size and number of nodes.

Measured through the real engine, with the real heads, so a step's time holds everything: forward
pass, LM head, acceptance, compaction, drafting and the engine's own work. Sizes take turns in one
running batch, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_medusa.calibration.errors import CalibrationError
from vllm_medusa.calibration.live import set_tree_size, step_clock
from vllm_medusa.load import LoadMeter

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 31, 47, 63, 95, 127)

# Larger trees are not tried once one's predicted gain falls below this share of the best so far.
HOPELESS = 0.6

# Room that requests have to grow in, tokens; a full one is replaced by a new request.
ROOM = 256

# Steps of a turn that may still have the size before, or belong to the scheduling ahead.
SPARE = 4


@dataclass(frozen=True)
class CostOptions:
    """How the cost is measured.

    Attributes:
        dtype, eager: as vLLM's dtype and enforce_eager.
        max_num_seqs: the largest batch size.
        context: tokens each request starts with.
        rounds: how often every size gets its turn.
        steps: steps that count in a turn; one step before them does not.
    """

    dtype: str = "auto"
    eager: bool = False
    max_num_seqs: int = 64
    context: int = 200
    rounds: int = 3
    steps: int = 5

    def batch_sizes(self) -> list[int]:
        """1, 2, 4, ... and the largest."""
        powers = [1 << power for power in range(self.max_num_seqs.bit_length())]
        return sorted({*powers, self.max_num_seqs})


@dataclass(frozen=True)
class StepCost:
    """Median times of a step, seconds, over ``steps`` of them."""

    nodes: int
    step: float
    forward: float
    drafting: float
    steps: int


@dataclass(frozen=True)
class BatchCost:
    """The cost curve at one batch size.

    Attributes:
        batch_size: requests in the batch.
        sizes: by number of nodes, rising, from 0 on.
        others: cores that other processes kept busy meanwhile (``LoadMeter``).
    """

    batch_size: int
    sizes: list[StepCost]
    others: float

    def seconds(self) -> dict[int, float]:
        """Seconds of a step by number of nodes."""
        return {cost.nodes: cost.step for cost in self.sizes}


def measure_costs(
    report: Callable[[Any], None],
    model: str,
    heads: str,
    paths: Sequence[Sequence[int]],
    tokens: Sequence[float],
    batch_sizes: Sequence[int],
    options: CostOptions,
) -> None:
    """Measure the cost curves; runs in a process of its own (``stage_process``).

    Reports what the engine is (dict, once), then a ``BatchCost`` per batch size, rising.

    Args:
        report: takes the reports.
        model, heads: the target, and the folder of its heads.
        paths: the tree, of the largest size that is tried.
        tokens: expected tokens per step by number of nodes, to tell what is hopeless.
        batch_sizes: those to measure.
        options: how.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    engine_options: dict[str, Any] = {}
    length = options.context + ROOM
    if current_platform.is_cpu():
        # By default the cache takes a share of the memory; this is what the batch needs.
        block_size = 128
        engine_options = {
            "block_size": block_size,
            "num_gpu_blocks_override": options.max_num_seqs * -(-length // block_size) + 8,
        }
    llm = LLM(
        model,
        dtype=options.dtype,
        enforce_eager=options.eager,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "medusa",
            "model": heads,
            "tree": [list(path) for path in paths],
            "lookup": False,  # its chains may be shorter than the size that is measured
        },
        **engine_options,
    )
    config = llm.llm_engine.vllm_config
    report({"dtype": str(config.model_config.dtype).removeprefix("torch.")})
    meter = _StepMeter(llm, options)
    for batch_size in batch_sizes:
        report(_measure_batch(meter, batch_size, tokens, options))


def _measure_batch(
    meter: _StepMeter, batch_size: int, tokens: Sequence[float], options: CostOptions
) -> BatchCost:
    """All sizes at one batch size, in turns."""
    load, own = LoadMeter(), time.process_time()
    steps: dict[int, list[dict[str, float]]] = defaultdict(list)
    depth = max(map(len, meter.paths))
    budget = meter.max_num_batched_tokens // batch_size - 1
    candidates = [size for size in SIZES if size < len(tokens) and size <= budget]
    best = 1.0
    for size in candidates:
        steps[size] += meter.turn(batch_size, size)
        ratio = _median(steps[size], "step") / _median(steps[0], "step")
        gain = tokens[size] / ratio
        best = max(best, gain)
        if ratio > 1 + depth or gain < HOPELESS * best:
            break
    for number in range(1, options.rounds):
        # To and fro: each size has its turn late in a round as often as early.
        for size in sorted(steps, reverse=number % 2 == 1):
            steps[size] += meter.turn(batch_size, size)
    return BatchCost(
        batch_size,
        [
            StepCost(
                size,
                _median(times, "step"),
                _median(times, "forward"),
                _median(times, "drafting"),
                len(times),
            )
            for size, times in sorted(steps.items())
        ],
        others=load.others(time.process_time() - own),
    )


def _median(steps: Sequence[dict[str, float]], part: str) -> float:
    return statistics.median(step.get(part, 0.0) for step in steps)


class _StepMeter:
    """Keeps a batch of requests running and times its steps."""

    def __init__(self, llm: Any, options: CostOptions) -> None:
        self.engine = llm.llm_engine
        self.options = options
        config = self.engine.vllm_config
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_num_batched_tokens = config.scheduler_config.max_num_batched_tokens
        self.paths = config.speculative_config.tree
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.clock = step_clock(llm)
        self._watch_scheduler()
        self.lengths: dict[str, int] = {}
        self.names = map(str, range(10**9))
        self.random = random.Random(0)

    def turn(self, batch_size: int, num_nodes: int) -> list[dict[str, float]]:
        """Times of some steps with so many requests and nodes each, by part; "step" is the whole.

        Raises:
            CalibrationError: the engine does not run such steps (out of KV cache, for example).
        """
        most = (self.options.steps + SPARE) * (1 + max(map(len, self.paths)))
        longest = max(self.lengths.values(), default=0)
        if len(self.lengths) != batch_size or longest + most + num_nodes > ROOM:
            self._new_requests(batch_size)
        set_tree_size(self.scheduler, num_nodes)
        # The first step still verifies drafts of the size before, and the first of this size may
        # find caches cold.
        wanted = batch_size * (1 + num_nodes)
        counted: list[dict[str, float]] = []
        for _ in range(self.options.steps + SPARE):
            times = self._step()
            if self.num_scheduled == wanted and len(self.lengths) == batch_size:
                counted.append(times)
            if len(counted) > self.options.steps:
                return counted[1:]
        raise CalibrationError(
            f"the engine does not keep {batch_size} requests with {num_nodes} nodes each running "
            f"(it scheduled {self.num_scheduled} tokens instead of {wanted}): "
            "give a smaller --max-num-seqs"
        )

    def _watch_scheduler(self) -> None:
        """Note how many tokens each step is given."""
        schedule = self.scheduler.schedule
        self.num_scheduled = 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.num_scheduled = output.total_num_scheduled_tokens
            return output

        self.scheduler.schedule = watched

    def _new_requests(self, batch_size: int) -> None:
        """Replace the running requests; the new ones' prompts are read here."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=ROOM, ignore_eos=True, detokenize=False
        )
        self.engine.abort_request(list(self.lengths))
        self.lengths = {}
        set_tree_size(self.scheduler, 0)
        for _ in range(batch_size):
            prompt = [self.random.randrange(self.vocab_size) for _ in range(self.options.context)]
            self.engine.add_request(next(self.names), {"prompt_token_ids": prompt}, sampling)
        # Prompts are read in pieces of what a step may hold, beside those that have begun.
        pieces = batch_size * (self.options.context + ROOM) // self.max_num_batched_tokens
        for _ in range(pieces + 4):
            self._step()
            if len(self.lengths) == batch_size:
                return
        raise CalibrationError(
            f"the engine does not start {batch_size} requests of {self.options.context} tokens at "
            "once: give a smaller --max-num-seqs"
        )

    def _step(self) -> dict[str, float]:
        started = time.perf_counter()
        outputs = self.engine.step()
        times = {"step": time.perf_counter() - started} | self.clock.take()
        for output in outputs:
            if output.finished:
                self.lengths.pop(output.request_id, None)
            else:
                self.lengths[output.request_id] = len(output.outputs[0].token_ids)
        return times
