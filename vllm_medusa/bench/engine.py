"""vLLM engines that take turns: one process per variant, driven over a pipe.

Ratios between variants are only to be trusted if they are measured side by side, so all engines are
alive at once and each prompt goes to one after the other. An engine runs inside its own process
(no worker process behind it), which lets the driver see every single step.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from vllm_medusa.bench.environment import compile_environment, log_file
from vllm_medusa.bench.generation import Generation, Parts, median_parts
from vllm_medusa.bench.variants import Variant
from vllm_medusa.calibration.clock import StepClock
from vllm_medusa.calibration.live import set_tree_size, step_clock
from vllm_medusa.demo.prompts import Prompt
from vllm_medusa.load import LoadMeter
from vllm_medusa.stage_process import (
    end_process,
    memory_advice,
    print_into,
    start_process,
    tail,
)
from vllm_medusa.training.answers import ChatTemplate


@dataclass
class Engine:
    """A vLLM engine in a process of its own.

    Attributes:
        variant: what it runs.
        model: the target, as vLLM takes it.
        options: further keyword arguments for `vllm.LLM`.
        chat_template: the text of a template to use in place of the model's own.
    """

    variant: Variant
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    def start(self) -> None:
        """Start the process and wait until the engine can answer.

        Raises:
            RuntimeError: with the end of the engine's log, if it could not start.
        """
        self.log = log_file(self.variant.name)
        self.process, self.connection = start_process(
            engine_process,
            str(self.log),
            self.model,
            self.variant,
            self.options,
            self.chat_template,
            environment=compile_environment(),
        )
        self.receive()

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int,
        temperature: float = 0.0,
        nodes: int | None = None,
    ) -> tuple[list[Generation], Parts, float]:
        """Answer prompts, all of them in one batch.

        Args:
            prompts: what to answer.
            max_tokens: where answers are cut.
            temperature: 0 is greedy; else each request gets a seed, the same in all variants.
            nodes: change the size of a Medusa engine's trees, from now on.

        Returns:
            The answers, the parts of their median decoding step, and how many cores other processes
            kept busy meanwhile (`LoadMeter`).

        Raises:
            RuntimeError: with the reason or the end of the engine's log, if the engine failed.
        """
        meter = LoadMeter()
        self.connection.send((prompts, max_tokens, temperature, nodes))
        answers, parts, cpu_seconds = self.receive()
        return answers, parts, meter.others(cpu_seconds)

    def receive(self) -> Any:
        """The next message of the process."""
        try:
            kind, value = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"the engine '{self.variant.name}' failed; the end of {self.log}:\n{tail(self.log)}"
            ) from None
        if kind == "error":
            raise RuntimeError(f"{self.variant.name}: {value}")
        return value

    def stop(self) -> None:
        """End the process, if it was started."""
        if hasattr(self, "process"):
            end_process(self.process, self.connection)


def engine_process(
    connection: Connection,
    log: str,
    model: str,
    variant: Variant,
    options: dict[str, Any],
    chat_template: str | None,
) -> None:
    """The engine's process: build it, say so, answer until the pipe closes."""
    print_into(log)
    import torch

    try:
        from vllm import LLM

        llm = LLM(
            model,
            speculative_config=variant.speculative_config,
            # A repeated prompt must cost what it cost the first time.
            enable_prefix_caching=False,
            **options,
        )
        template = ChatTemplate(llm.get_tokenizer(), chat_template, model)
        clock = step_clock(llm)
        connection.send(("ready", None))
        while True:
            prompts, max_tokens, temperature, nodes = connection.recv()
            if nodes is not None:
                set_tree_size(llm.llm_engine.engine_core.engine_core.scheduler, nodes)
            started = time.process_time()
            answers, parts = answer_all(llm, clock, template, prompts, max_tokens, temperature)
            connection.send(("answers", (answers, parts, time.process_time() - started)))
    except EOFError:
        pass
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        connection.send(("error", f"{memory_advice(error)}\n(the whole log: {log})"))
    except ValueError as error:
        traceback.print_exc()
        connection.send(("error", f"{error}\n(the whole log: {log})"))
    except BaseException:
        traceback.print_exc()
        raise


def answer_all(
    llm: Any,
    clock: StepClock,
    template: ChatTemplate,
    prompts: Sequence[Prompt],
    max_tokens: int,
    temperature: float,
) -> tuple[list[Generation], Parts]:
    """Answer prompts in one batch, watching each step.

    Returns:
        The answers, and the parts of the median decoding step: one in which no prompt is read.

    Raises:
        ValueError: a prompt leaves no room for an answer.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    config = engine.vllm_config
    waiting: deque[tuple[int, list[int]]] = deque()
    for number, prompt in enumerate(prompts):
        token_ids = template.prompt(prompt.messages)
        if len(token_ids) >= config.model_config.max_model_len:
            raise ValueError(
                f"the prompt '{prompt.name}' has {len(token_ids)} tokens and leaves no room for an "
                f"answer within {config.model_config.max_model_len}: give a larger --max-model-len"
            )
        waiting.append((number, token_ids))
    rows = 1 + config.num_speculative_tokens
    answers = [Generation([], [], []) for _ in prompts]
    running: set[int] = set()
    steps: list[Parts] = []
    started = time.perf_counter()
    while waiting or running:
        # Prompts are read whole: in vLLM's V1 runner on a CPU, a request with a seed can fail if
        # its prompt is read in pieces. What does not fit into a step waits for the next one.
        room = config.scheduler_config.max_num_batched_tokens - rows * len(running)
        while waiting and (len(waiting[0][1]) <= room or not running):
            number, token_ids = waiting.popleft()
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                seed=zlib.crc32(f"{number} {prompts[number].name}".encode())
                if temperature
                else None,
            )
            engine.add_request(str(number), {"prompt_token_ids": token_ids}, sampling)
            running.add(number)
            room -= len(token_ids)
        decoding = all(answers[number].counts for number in running)
        before = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        parts = {"step": ended - before} | clock.take()
        if decoding:
            steps.append(parts)
        now = ended - started
        for output in outputs:
            number = int(output.request_id)
            answer, token_ids = answers[number], list(output.outputs[0].token_ids)
            if len(token_ids) > len(answer.token_ids):
                answer.token_ids[:] = token_ids
                answer.counts.append(len(token_ids))
                answer.times.append(now)
            if output.finished:
                running.discard(number)
    return answers, median_parts(steps)
