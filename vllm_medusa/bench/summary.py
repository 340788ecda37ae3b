"""From rounds to numbers: one row per variant, prompt set, temperature and concurrency."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_medusa.bench import generation as of
from vllm_medusa.bench.calibration import Calibration
from vllm_medusa.bench.rounds import Round
from vllm_medusa.bench.variants import Variant, is_heads_only

ALL = "all"


@dataclass(frozen=True)
class Spread:
    """The median of some values and their quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """What was found for one variant on one set at one temperature and concurrency.

    Attributes:
        variant: its name.
        kind: the prompt set, `ALL` for all of them together.
        temperature: of sampling.
        concurrency: requests that arrived together.
        rounds: how many were measured.
        answers: in these rounds.
        tokens_per_second: decoding, all requests together; the median round.
        speed_up: of decoding over the first variant, round by round.
        speed_up_whole: the same with the prefill.
        milliseconds_per_token: between two tokens of a request; the median answer.
        milliseconds_to_first_token: the median answer.
        milliseconds_per_step: the median decoding step.
        tokens_per_step: of a request, over all its decoding steps.
        accepted: entry d is the share of decoding steps that kept at least d + 1 drafted tokens.
        identical: answers that equal the first variant's, token by token.
        bound: the speed-up that these tokens per step allow at the calibrated cost of a step.
        predicted: the speed-up that the calibration predicts.
        milliseconds_by_part: of the median decoding step, the median round; empty where the rounds
            have no parts.
    """

    variant: str
    kind: str
    temperature: float
    concurrency: int
    rounds: int
    answers: int
    tokens_per_second: float
    speed_up: Spread
    speed_up_whole: Spread
    milliseconds_per_token: float
    milliseconds_to_first_token: float
    milliseconds_per_step: float
    tokens_per_step: float
    accepted: list[float]
    identical: int
    bound: float | None
    predicted: float | None
    milliseconds_by_part: dict[str, float] = field(default_factory=dict)


def summarize(
    variants: Sequence[Variant], rounds: Sequence[Round], calibration: Calibration
) -> list[Row]:
    """All rows; the first variant is what the others are compared with.

    Settings stand in the order in which they were measured, and in each the rows of all sets
    together before those of every set (where there are several).
    """
    settings = dict.fromkeys((each.concurrency, each.temperature) for each in rounds)
    kinds = list(dict.fromkeys(each.kind for each in rounds))
    rows = []
    for concurrency, temperature in settings:
        for kind in [ALL, *kinds] if len(kinds) > 1 else kinds:
            chosen = [
                each
                for each in rounds
                if (each.concurrency, each.temperature) == (concurrency, temperature)
                and kind in (ALL, each.kind)
            ]
            rows += [
                summarize_variant(variant, index, kind, chosen, calibration)
                for index, variant in enumerate(variants)
                if chosen
            ]
    return rows


def summarize_variant(
    variant: Variant, index: int, kind: str, rounds: Sequence[Round], calibration: Calibration
) -> Row:
    """The row of the variant that stands at `index` in every round."""
    concurrency = rounds[0].concurrency
    answers = [answer for each in rounds for answer in each.batches[index]]
    base = [answer for each in rounds for answer in each.batches[0]]
    per_step = of.tokens_per_step(answers)
    nodes = calibration.nodes_at(concurrency) if variant.calibrated else variant.nodes
    cost = calibration.cost(nodes, concurrency) if nodes is not None else None
    expected = calibration.tokens_per_step(nodes) if nodes is not None else None
    return Row(
        variant=variant.name,
        kind=kind,
        temperature=rounds[0].temperature,
        concurrency=concurrency,
        rounds=len(rounds),
        answers=len(answers),
        tokens_per_second=median([of.decoding_speed(each.batches[index]) for each in rounds]),
        speed_up=speed_ups(rounds, index, of.decoding_speed),
        speed_up_whole=speed_ups(rounds, index, of.overall_speed),
        milliseconds_per_token=1e3 * median(of.seconds_per_token(answers)),
        milliseconds_to_first_token=1e3 * median(of.first_token_seconds(answers)),
        milliseconds_per_step=1e3 * median(of.step_seconds(answers)),
        tokens_per_step=per_step,
        accepted=of.accepted_per_depth(answers),
        identical=sum(
            mine.token_ids == plain.token_ids for mine, plain in zip(answers, base, strict=True)
        ),
        bound=per_step / cost if cost else None,
        # Calibration knows the heads alone.
        predicted=expected / cost if expected and cost and is_heads_only(variant) else None,
        milliseconds_by_part={
            part: 1e3 * seconds
            for part, seconds in of.median_parts(
                [each.parts[index] for each in rounds if each.parts and each.parts[index]]
            ).items()
        },
    )


def speed_ups(rounds: Sequence[Round], index: int, speed: Callable[[of.Batch], float]) -> Spread:
    """Ratios to the first variant, round by round."""
    return spread([speed(each.batches[index]) / speed(each.batches[0]) for each in rounds])


def median(values: Sequence[float]) -> float:
    """The median, of which values that are not numbers have no part; nan for none."""
    return spread(values).median


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; all the same for fewer than two values, nan for none.

    Values that are not numbers (the speed of an answer of one token) have no part in it.
    """
    values = [value for value in values if not math.isnan(value)]
    if len(values) < 2:
        only = values[0] if values else float("nan")
        return Spread(only, only, only)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)
