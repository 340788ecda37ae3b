"""`vllm serve` as a child process: started, waited for, talked to, and stopped as by Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vllm_medusa.bench.environment import compile_environment, log_file
from vllm_medusa.cpu_setup import cpu_environment
from vllm_medusa.stage_process import tail

# A cold start compiles the model, which takes minutes on two cores.
START_SECONDS = 600
STOP_SECONDS = 60


@dataclass
class Server:
    """A `vllm serve` process.

    Attributes:
        model: folder of the target.
        arguments: further arguments of `vllm serve`.
        name: what clients call the model.
        port: a free one unless given.
    """

    model: Path
    arguments: list[str]
    name: str = "smollm2"
    port: int = field(default_factory=lambda: free_port())

    @property
    def command(self) -> list[str]:
        """The command line, with the `vllm` of this environment."""
        vllm = Path(sys.executable).with_name("vllm")
        options = ["--served-model-name", self.name, "--port", str(self.port)]
        return [str(vllm), "serve", str(self.model), *options, *self.arguments]

    @property
    def base_url(self) -> str:
        """Where the OpenAI interface answers."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            RuntimeError: with the end of its log, if it ends or does not become healthy in time.
        """
        self.log = log_file(f"server {self.name}")
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | cpu_environment() | compile_environment(),
                # A process group of its own: Ctrl-C reaches all processes of a server at once.
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self.process.poll() is not None:
                raise RuntimeError(self.failure(f"ended with status {self.process.returncode}"))
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(self.failure(f"was not healthy after {START_SECONDS} s"))
            time.sleep(0.5)

    def healthy(self) -> bool:
        """Whether the server answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def stream_chat(self, text: str, max_tokens: int) -> Iterator[str]:
        """The pieces of the answer to one user message, as they arrive."""
        from openai import OpenAI

        client = OpenAI(base_url=self.base_url, api_key="unused")
        chunks = client.chat.completions.create(
            model=self.name,
            messages=[{"role": "user", "content": text}],
            temperature=0.0,
            max_tokens=max_tokens,
            stream=True,
        )
        for chunk in chunks:
            if chunk.choices:
                yield chunk.choices[0].delta.content or ""

    def stop(self) -> None:
        """Stop the server as Ctrl-C does, and check that it ends cleanly.

        Raises:
            RuntimeError: with the end of its log, if it hangs, fails, or leaves processes behind.
        """
        group = self.process.pid
        os.killpg(group, signal.SIGINT)
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(self.failure(f"still ran {STOP_SECONDS} s after SIGINT")) from None
        if status != 0:
            raise RuntimeError(self.failure(f"ended with status {status} after SIGINT"))
        # The front end is through; the processes behind it may take a moment to notice.
        deadline = time.monotonic() + STOP_SECONDS
        while group_exists(group) and time.monotonic() < deadline:
            time.sleep(0.1)
        if group_exists(group):
            self.kill()
            raise RuntimeError(self.failure("left processes behind after SIGINT"))

    def kill(self) -> None:
        """End the server and its processes at once, if any of them runs."""
        if group_exists(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def failure(self, what: str) -> str:
        """A message with the end of the log."""
        return f"vllm serve {what}; the end of {self.log}:\n{tail(self.log)}"


def group_exists(group: int) -> bool:
    """Whether any process of a process group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
