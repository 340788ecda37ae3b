"""Serve a model with Medusa heads on Ray Serve: replicas of vLLM's own OpenAI server.

    pip install 'vllm-medusa[ray]'
    python examples/ray_serve.py MODEL HEADS --replicas 2        # starts Ray on this machine
    python examples/client.py "Why is the sky blue?"

On a running cluster, with the options of `vllm serve` as a list:

    serve run examples.ray_serve:build model=MODEL heads=HEADS

or by a configuration, as examples/kuberay.yaml does. Every replica is a whole vLLM server (chat,
completions, streaming, tokenize, /health, ...), and Ray Serve spreads the requests over them. A
replica whose engine died fails its health check and is replaced; requests that it was serving end
with an error at once, all others go to the other replicas.

Ray's own LLM serving (`ray[llm]`) installs one fixed release of vLLM, which this plugin may not
support; this needs `ray[serve]` only, beside the vLLM that is installed.
"""

import argparse
from contextlib import AsyncExitStack

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, HTTPOptions

from vllm_medusa.cpu_setup import cpu_environment


class Arguments(BaseModel):
    """What `build` takes.

    Attributes:
        model: the target, a folder or a hub id.
        heads: the heads, a folder or a hub id with @REVISION if wanted; a folder must be there on
            every node that replicas may run on.
        options: further options of `vllm serve`.
        min_replicas, max_replicas: Ray Serve keeps as many as the load needs between these.
        requests_per_replica: the load that is aimed at; at twice that, requests wait in the proxy.
        cpus: cores of a replica, kept free for it by Ray. Ray starts its processes with as many
            threads.
        gpus: accelerators of a replica.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    heads: str
    options: list[str] = []
    min_replicas: int = 1
    max_replicas: int = 4
    requests_per_replica: int = 32
    cpus: float = 1
    gpus: float = 0


@serve.deployment(health_check_period_s=5, graceful_shutdown_timeout_s=60)
@serve.ingress()
class OpenAIServer:
    """One replica: vLLM's engine, and vLLM's application in front of it."""

    async def __init__(self, options: list[str]) -> None:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self.running = AsyncExitStack()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(options)
        validate_parsed_serve_args(args)
        self.engine = await self.running.enter_async_context(build_async_engine_client(args))
        tasks = await self.engine.get_supported_tasks()
        self.application = build_app(args, tasks, self.engine.model_config)
        await init_app_state(self.engine, self.application.state, args, tasks)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Ray Serve sends this replica's requests to."""
        return self.application

    async def check_health(self) -> None:
        """Asked by Ray Serve every few seconds; raises once the engine is dead."""
        await self.engine.check_health()

    async def __del__(self) -> None:
        await self.running.aclose()


def build(args: Arguments) -> Application:
    """The application, for `serve run` and for configurations."""
    resources = {"num_cpus": args.cpus, "num_gpus": args.gpus}
    if not args.gpus:
        # What vLLM wants preloaded on a CPU. Which cores and how many is left to Ray: those of
        # this machine say nothing about the others.
        environment = cpu_environment() | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        del environment["OMP_NUM_THREADS"]
        resources["runtime_env"] = {"env_vars": environment}
    deployment = OpenAIServer.options(
        ray_actor_options=resources,
        max_ongoing_requests=2 * args.requests_per_replica,
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=max(args.min_replicas, args.max_replicas),
            target_ongoing_requests=args.requests_per_replica,
        ),
    )
    return deployment.bind(
        ["--model", args.model, "--speculative-model", f"medusa:{args.heads}", *args.options]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with Medusa heads on Ray Serve.")
    parser.add_argument("model", help="the target: a folder or a hub id")
    parser.add_argument("heads", help="the heads: a folder or a hub id")
    parser.add_argument("--replicas", type=int, default=2, help="at least so many (default: 2)")
    parser.add_argument("--port", type=int, default=8000)
    args, options = parser.parse_known_args()
    print("Options for vllm serve:", " ".join(options) or "none")

    serve.start(http_options=HTTPOptions(port=args.port))
    arguments = Arguments(
        model=args.model, heads=args.heads, min_replicas=args.replicas, options=options
    )
    serve.run(build(arguments), blocking=True)


if __name__ == "__main__":
    main()
