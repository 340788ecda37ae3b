"""vLLM engines that take turns: one process per variant, driven over a pipe.

Ratios between variants are only to be trusted if they are measured side by side, so all engines are
alive at once and each prompt goes to one after the other. An engine runs inside its own process
(no worker process behind it), which lets the driver see every single step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_medusa.cpu_setup import cpu_environment
from vllm_medusa.demo.load import LoadMeter
from vllm_medusa.demo.paths import cache_folder


@dataclass(frozen=True)
class Variant:
    """A way to run the target.

    Attributes:
        name: as it stands in the tables.
        speculative_config: vLLM's option of that name; None for no speculation.
    """

    name: str
    speculative_config: dict[str, Any] | None


@dataclass(frozen=True)
class Generation:
    """One answer, with the time of every step.

    Attributes:
        token_ids: the answer's tokens.
        counts: tokens known after each step, the first of which is the prefill's.
        times: seconds from the request's arrival to the end of each step.
        others: cores that other processes kept busy on average (`LoadMeter`).
    """

    token_ids: list[int]
    counts: list[int]
    times: list[float]
    others: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: from the first token to the last, without the prefill."""
        return (self.counts[-1] - self.counts[0]) / (self.times[-1] - self.times[0])


def tokens_per_step(generations: Sequence[Generation]) -> float:
    """Tokens per decoding step over several answers, 1 without speculation."""
    tokens = sum(generation.counts[-1] - generation.counts[0] for generation in generations)
    return tokens / sum(len(generation.counts) - 1 for generation in generations)


@dataclass
class Engine:
    """A vLLM engine in a process of its own.

    Attributes:
        variant: what it runs.
        model: folder of the target.
        options: further keyword arguments for `vllm.LLM`.
    """

    variant: Variant
    model: Path
    options: dict[str, Any] = field(default_factory=dict)

    def start(self) -> None:
        """Start the process and wait until the engine can answer.

        Raises:
            RuntimeError: with the end of the engine's log, if it could not start.
        """
        self.log = log_file(self.variant.name)
        self.connection, theirs = multiprocessing.Pipe()
        arguments = (theirs, str(self.log), str(self.model), self.variant, self.options)
        # spawn: the environment must be right before the process loads its first library.
        context = multiprocessing.get_context("spawn")
        with environment(engine_environment()):
            self.process = context.Process(target=engine_process, args=arguments)
            self.process.start()
        theirs.close()
        self.receive()

    def generate(self, texts: list[str], max_tokens: int) -> list[Generation]:
        """Answer user messages greedily, all of them in one batch.

        Raises:
            RuntimeError: with the end of the engine's log, if the engine failed.
        """
        meter = LoadMeter()
        self.connection.send((texts, max_tokens))
        answers, cpu_seconds = self.receive()
        others = meter.others(cpu_seconds)
        return [dataclasses.replace(answer, others=others) for answer in answers]

    def receive(self) -> Any:
        """The next message of the process."""
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"the engine '{self.variant.name}' failed; the end of {self.log}:\n{tail(self.log)}"
            ) from None

    def stop(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.join(timeout=20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def engine_environment() -> dict[str, str]:
    """Environment variables of an engine process, and of the demo's server."""
    cores = cpu_environment()
    return cores | {
        # No worker process: the engine's steps happen in the process that asks for them.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **compile_environment(),
    }


def compile_environment() -> dict[str, str]:
    """Where vLLM and torch keep compiled graphs, so that a second start is a warm one."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "inductor"),
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm"),
        # With ahead-of-time compilation, a warm start on the CPU compiles again.
        "VLLM_USE_AOT_COMPILE": "0",
        # GiB. By default each engine would take most of the memory for itself.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def engine_process(
    connection: Connection, log: str, model: str, variant: Variant, options: dict[str, Any]
) -> None:
    """The engine's process: build it, say so, answer until the pipe closes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        from vllm import LLM

        llm = LLM(
            model,
            dtype="float32",
            speculative_config=variant.speculative_config,
            # A repeated prompt must cost what it cost the first time.
            enable_prefix_caching=False,
            **options,
        )
        connection.send("ready")
        while True:
            texts, max_tokens = connection.recv()
            started = time.process_time()
            answers = answer_all(llm, texts, max_tokens)
            connection.send((answers, time.process_time() - started))
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()
        raise


def answer_all(llm: Any, texts: list[str], max_tokens: int) -> list[Generation]:
    """Answer user messages in one batch, watching each step."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    tokenizer = llm.get_tokenizer()
    engine = llm.llm_engine
    for number, text in enumerate(texts):
        message = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=False
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    answers = [Generation([], [], []) for _ in texts]
    started = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            answer = answers[int(output.request_id)]
            answer.token_ids[:] = output.outputs[0].token_ids
            answer.counts.append(len(answer.token_ids))
            answer.times.append(now)
    return answers


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a while: a spawned process takes over what is set."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def log_file(name: str) -> Path:
    """The log of the process with this name; its folder is made."""
    folder = cache_folder() / "logs"
    folder.mkdir(exist_ok=True)
    return folder / f"{name.replace(' ', '-')}.log"


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a file."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
