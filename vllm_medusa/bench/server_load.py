"""A load test: two servers, with and without Medusa, under the same load in turns.

    python -m vllm_medusa.bench.server_load MODEL HEADS --output docs

Both servers are up all the time. At every concurrency c, c clients ask one server after another
request until all are answered, then do the same with the other server, several times over. The
ratio of the two throughputs is taken pair by pair. An answer that did not arrive whole is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.bench.environment import memory_options
from vllm_medusa.bench.prompts import SOURCES, prompt_set
from vllm_medusa.bench.report import markdown_table
from vllm_medusa.bench.rounds import DISTURBED
from vllm_medusa.demo.prompts import Prompt
from vllm_medusa.demo.server import Server
from vllm_medusa.load import LoadMeter
from vllm_medusa.machine import describe_machine
from vllm_medusa.picture import COLOURS, picture

KINDS = ("chat", "code")
NAMES = ("plain vLLM", "Medusa")
HEADINGS = ("clients", "requests", *(f"{name} tok/s" for name in NAMES), "ratio", "lowest-highest",
            "same text", "disturbed")  # fmt: skip


class LoadError(RuntimeError):
    """An answer did not arrive whole."""


@dataclass(frozen=True)
class Load:
    """What one server did under one load.

    Attributes:
        seconds: from the first request to the last answer.
        tokens: in all answers together.
        texts: the answers.
        others: cores that other processes kept busy meanwhile.
    """

    seconds: float
    tokens: int
    texts: list[str]
    others: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Level:
    """What was found at one concurrency.

    Attributes:
        clients: how many ask at once.
        requests: how many each server answered in each repetition.
        tokens_per_second: the median of each server.
        ratios: of the throughputs, Medusa's to plain vLLM's, of each repetition.
        identical: equal answers, over all repetitions.
        disturbed: repetitions beside which other processes were busy.
    """

    clients: int
    requests: int
    tokens_per_second: tuple[float, float]
    ratios: list[float]
    identical: int
    disturbed: int

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def summarize_level(clients: int, pairs: Sequence[tuple[Load, Load]]) -> Level:
    """One level from its repetitions, each a load of plain vLLM and one of Medusa."""
    return Level(
        clients=clients,
        requests=len(pairs[0][0].texts),
        tokens_per_second=(
            statistics.median(plain.tokens_per_second for plain, _ in pairs),
            statistics.median(medusa.tokens_per_second for _, medusa in pairs),
        ),
        ratios=[medusa.tokens_per_second / plain.tokens_per_second for plain, medusa in pairs],
        identical=sum(
            one == other
            for plain, medusa in pairs
            for one, other in zip(plain.texts, medusa.texts, strict=True)
        ),
        disturbed=sum(max(plain.others, medusa.others) > DISTURBED for plain, medusa in pairs),
    )


def send_load(
    base_url: str, model: str, prompts: Sequence[Prompt], clients: int, max_tokens: int
) -> Load:
    """Ask for greedy answers to all prompts, so many at once.

    Raises:
        LoadError: an answer did not arrive whole.
    """
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="unused", timeout=600, max_retries=0)

    def ask(prompt: Prompt) -> tuple[str, int]:
        answer = client.chat.completions.create(
            model=model, messages=prompt.messages, temperature=0.0, max_tokens=max_tokens
        )
        return whole_answer(answer, prompt.name, max_tokens)

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, prompts))
    seconds = time.perf_counter() - started
    return Load(seconds, sum(tokens for _, tokens in answers), [text for text, _ in answers])


def whole_answer(answer: Any, name: str, max_tokens: int) -> tuple[str, int]:
    """Text and number of tokens of an answer.

    Raises:
        LoadError: it ended for another reason than its end or `max_tokens`, or lacks tokens.
    """
    choice, tokens = answer.choices[0], answer.usage.completion_tokens
    reason = choice.finish_reason
    if reason not in ("stop", "length") or (reason == "length" and tokens != max_tokens):
        raise LoadError(f"the answer to {name} ended after {tokens} tokens with {reason!r}")
    return choice.message.content or "", tokens


def group_cpu_seconds(group: int) -> float:
    """CPU seconds that the living processes of a process group have used."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while its file is being read.
        with contextlib.suppress(OSError):
            # Behind the name in brackets: state, parent, group, ...; user and system time last.
            fields = file.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """Start servers one by one; stop them at the end as by Ctrl-C, or at once after an error."""
    started: list[Server] = []
    try:
        for server in servers:
            server.start()
            started.append(server)
        yield
        while started:
            started.pop().stop()
    finally:
        for server in started:
            server.kill()


def measure(
    servers: Sequence[Server], prompts: Sequence[Prompt], levels: Sequence[int],
    requests: int, repetitions: int, max_tokens: int,
) -> list[Level]:  # fmt: skip
    """All levels; `requests` is the least number at a level, two for each client the usual one."""

    def load(server: Server, clients: int, asked: Sequence[Prompt]) -> Load:
        meter, started = LoadMeter(), own_cpu_seconds()
        done = send_load(server.base_url, server.name, asked, clients, max_tokens)
        others = meter.others(own_cpu_seconds() - started)
        return Load(done.seconds, done.tokens, done.texts, others)

    def own_cpu_seconds() -> float:
        return time.process_time() + sum(group_cpu_seconds(each.process.pid) for each in servers)

    for server in servers:
        load(server, 2, prompts[:2])  # to warm up
    results = []
    for number, clients in enumerate(levels):
        asked = list(itertools.islice(itertools.cycle(prompts), max(requests, 2 * clients)))
        pairs = []
        for repetition in range(repetitions):
            order = (0, 1) if (number + repetition) % 2 == 0 else (1, 0)
            loads = {index: load(servers[index], clients, asked) for index in order}
            pairs.append((loads[0], loads[1]))
        results.append(summarize_level(clients, pairs))
        print(" | ".join(level_cells(results[-1], repetitions)), flush=True)
    return results


def level_cells(level: Level, repetitions: int) -> tuple[str, ...]:
    """The table's line of a level, under `HEADINGS`."""
    return (
        str(level.clients),
        str(level.requests),
        *(f"{speed:.1f}" for speed in level.tokens_per_second),
        f"{level.ratio:.2f}",
        f"{min(level.ratios):.2f}-{max(level.ratios):.2f}",
        f"{level.identical} of {level.requests * repetitions}",
        f"{level.disturbed} of {repetitions}",
    )


def page(levels: Sequence[Level], settings: dict[str, str], repetitions: int, repeat: str) -> str:
    """The result as a page."""
    lines = [
        "# Throughput under load, with and without Medusa",
        "",
        *markdown_table(HEADINGS, [level_cells(level, repetitions) for level in levels]),
        "",
        f"Two servers (`vllm serve`), up at the same time and loaded in turns, {repetitions} times "
        "at every level. tok/s: tokens of all answers over the time from the first request to the "
        "last answer, the median. ratio: of the two, pair by pair: the median, the lowest and the "
        "highest. same text: answers equal to plain vLLM's (other batch shapes round differently). "
        f"disturbed: repetitions in which other processes kept more than {DISTURBED} cores busy. "
        "Every answer arrived whole.",
        "",
        *markdown_table(("", ""), list(settings.items())),
        "",
        "To repeat it:",
        "",
        f"    {repeat}",
    ]
    return "\n".join(lines) + "\n"


def draw(levels: Sequence[Level], path: Path) -> None:
    """The ratio by number of clients, with all repetitions, saved as PNG."""
    places = range(len(levels))
    with picture(path, figsize=(7, 4)) as [[axes]]:
        axes.plot(places, [level.ratio for level in levels], color=COLOURS[0], marker="o")
        for place, level in zip(places, levels, strict=True):
            axes.scatter([place] * len(level.ratios), level.ratios, s=12, color=COLOURS[4])
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(places, [str(level.clients) for level in levels])
        axes.set_xlabel("clients at once")
        axes.set_ylabel("throughput, Medusa / plain vLLM")


def server_options(args: argparse.Namespace, on_cuda: bool) -> list[str]:
    """What both servers are started with."""
    options = ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
    # A repeated prompt must cost what it cost the first time.
    options += ["--no-enable-prefix-caching", "--shutdown-timeout", "20"]
    options += ["--enforce-eager"] if args.eager else []
    for name, share in memory_options(len(NAMES), on_cuda).items():
        options += [f"--{name.replace('_', '-')}", str(share)]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("heads", metavar="HEADS")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=8, help="at least, per level (default: 8)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: 3)")
    parser.add_argument("--max-tokens", type=int, default=32, help="per answer (default: 32)")
    parser.add_argument("--dtype", default="auto", help="as vLLM takes it (default: auto)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--max-model-len", type=int, default=1024, help="tokens (default: 1024)")
    parser.add_argument("--output", type=Path, help="folder for load.json, load.md and load.png")
    args = parser.parse_args(arguments)
    from vllm.platforms import current_platform

    options = server_options(args, current_platform.is_cuda_alike())
    model = Path(args.model)
    servers = [
        Server(model, options, name="plain"),
        Server(model, ["--speculative-model", f"medusa:{args.heads}", *options], name="medusa"),
    ]
    sets = [prompt_set(kind, max(args.requests, 2 * max(args.levels))) for kind in KINDS]
    prompts = [prompt for pair in zip(*sets, strict=False) for prompt in pair]
    print(" | ".join(HEADINGS), flush=True)
    with running(servers):
        levels = measure(
            servers, prompts, args.levels, args.requests, args.repetitions, args.max_tokens
        )
    if args.output is None:
        return
    settings = {
        "Model": model.name,
        "Heads": Path(args.heads).name,
        "Type of the weights": args.dtype,
        "Compiled": "no (eager)" if args.eager else "yes",
        "Tokens per answer": f"up to {args.max_tokens}, greedy",
        **{f"Prompts, {kind}": SOURCES[kind] for kind in KINDS},
        **describe_machine(),
    }
    repeat = (
        f"python -m vllm_medusa.bench.server_load {model.name} {Path(args.heads).name} "
        f"--dtype {args.dtype} --levels {' '.join(map(str, args.levels))} "
        f"--requests {args.requests} --repetitions {args.repetitions} "
        f"--max-tokens {args.max_tokens}{' --eager' if args.eager else ''}"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    result = {"levels": [asdict(each) | {"ratio": each.ratio} for each in levels]} | settings
    (args.output / "load.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page(levels, settings, args.repetitions, repeat)
    (args.output / "load.md").write_text(text, encoding="utf-8")
    draw(levels, args.output / "load.png")


if __name__ == "__main__":
    main()
