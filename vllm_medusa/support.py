"""What is supported: combinations that were not tested are refused when the configuration is
built."""

import os
from collections.abc import Iterator

import vllm.envs as envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.executor.abstract import Executor

from vllm_medusa.attention.gpu import choose_attention
from vllm_medusa.manifest import installed_release

# Architectures whose greedy output with trees is compared with that without in
# tests/integration/test_greedy.py.
TESTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

# What is served, by release and model runner of vLLM: the one place to enable another. A release
# needs a manifest in patches/ too. V1 serves on CPUs only (runner/v1.py), and not in 0.33: vLLM
# deprecates it, and has no wheel of that release for CPUs.
SERVED = {("0.32.0", "V1"), ("0.32.0", "V2"), ("0.33.0", "V2")}

# KV connectors whose output with trees is compared with that without in
# tests/integration/test_kv_connector.py. vLLM calls a connector during the forward pass, when the
# rows of a tree are not compacted yet: one that saves them then would save what is not the text.
TESTED_CONNECTORS = ("ExampleConnector",)

# vLLM's workers, by what is used in their place: the same with another model runner.
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "vllm_medusa.runner.worker.MedusaCPUWorker",
    "vllm.v1.worker.gpu_worker.Worker": "vllm_medusa.runner.gpu_worker.MedusaGPUWorker",
}

# Lets people try what was not tested. It lifts the check of the architecture only; combinations
# that are known not to work stay refused.
ALLOW_UNTESTED = "VLLM_MEDUSA_ALLOW_UNTESTED"


def check_supported(config: VllmConfig) -> None:
    """Refuse a configuration that Medusa cannot serve.

    Raises:
        ValueError: names everything that stands against it and the way out, all in one message.
    """
    problems = list(_problems(config))
    if problems:
        raise ValueError(
            "medusa cannot serve this configuration:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nChange what is named, or serve without --speculative-model."
        )


def choose_worker(config: VllmConfig) -> None:
    """Have vLLM start our worker, which is its own with another model runner."""
    parallel = config.parallel_config
    parallel.worker_cls = WORKERS.get(parallel.worker_cls, parallel.worker_cls)


def choose_scheduling(config: VllmConfig, asked: bool | None) -> None:
    """Schedule ahead of the device as vLLM does by default, where the runner can.

    Args:
        config: built with asynchronous scheduling off.
        asked: what the user said about it; None: nothing.
    """
    can = config.use_v2_model_runner and Executor.get_class(config).supports_async_scheduling()
    config.scheduler_config.async_scheduling = bool(can if asked is None else asked)


def choose_executor(config: VllmConfig) -> None:
    """Have vLLM's Ray executor look at the nodes before it starts workers there."""
    if config.parallel_config.distributed_executor_backend == "ray":
        from vllm_medusa.cluster.executor import MedusaRayExecutor

        config.parallel_config.distributed_executor_backend = MedusaRayExecutor


def _problems(config: VllmConfig) -> Iterator[str]:
    yield from _platform_problems(config)
    yield from _model_problems(config)
    yield from _engine_problems(config)


def _platform_problems(config: VllmConfig) -> Iterator[str]:
    release, runner = installed_release(), "V2" if config.use_v2_model_runner else "V1"
    if (release, runner) not in SERVED:
        served = ", ".join(f"{runner} of {release}" for release, runner in sorted(SERVED))
        yield f"the {runner} model runner of vLLM {release}: vllm-medusa serves {served}"
    if current_platform.is_cuda():
        if not config.use_v2_model_runner:
            yield "the V1 model runner on a GPU: unset VLLM_USE_V2_MODEL_RUNNER, the default is V2"
        try:
            choose_attention(config)
        except ValueError as error:
            yield str(error)
        return
    if not current_platform.is_cpu():
        yield f"platform {current_platform.device_name}: use an NVIDIA GPU or an x86 CPU"
        return
    arch = current_platform.get_cpu_architecture()
    if arch != CpuArchEnum.X86:
        yield (
            f"CPU architecture {arch.name}: its KV cache layout is not the one the tree kernel "
            "reads ('vec', on x86)"
        )
    if config.use_v2_model_runner and os.environ.get("TRITON_INTERPRET") != "1":
        yield "the V2 model runner on a CPU: unset VLLM_USE_V2_MODEL_RUNNER, the default here is V1"


def _model_problems(config: VllmConfig) -> Iterator[str]:
    model = config.model_config
    text = model.hf_text_config
    if model.runner_type != "generate":
        yield f"runner type {model.runner_type!r}: only text generation can be speculated"
        return
    found = {
        "an encoder-decoder target": model.is_encoder_decoder,
        "a target with Mamba or linear-attention layers": model.is_hybrid or model.has_inner_state,
        "a target without attention": model.is_attention_free,
        "multi-head latent attention (MLA)": model.use_mla,
        "ALiBi": model.uses_alibi,
        "multi-dimensional rotary positions (M-RoPE)": model.uses_mrope,
        "a multimodal target": model.is_multimodal_model,
        "sliding-window attention": _has_sliding_window(text),
        "attention logit soft cap": bool(getattr(text, "attn_logit_softcapping", None)),
        "attention sinks": "GptOss" in model.architecture,
        "custom logits processors on the V1 runner (vLLM refuses them with speculation too)": bool(
            model.logits_processors and not config.use_v2_model_runner
        ),
    }
    for feature, is_there in found.items():
        if is_there:
            yield f"{feature} (model {model.model}, architecture {model.architecture})"
    if model.architecture not in TESTED_ARCHITECTURES and not os.environ.get(ALLOW_UNTESTED):
        yield (
            f"architecture {model.architecture} was not tested; tested are "
            f"{', '.join(TESTED_ARCHITECTURES)}. {ALLOW_UNTESTED}=1 tries it all the same"
        )


def _has_sliding_window(text_config: object) -> bool:
    layer_types = getattr(text_config, "layer_types", None) or []
    if layer_types:
        return any("sliding" in kind or "chunked" in kind for kind in layer_types)
    return bool(getattr(text_config, "sliding_window", None))


def _engine_problems(config: VllmConfig) -> Iterator[str]:
    parallel, cache = config.parallel_config, config.cache_config
    model_type = str(config.model_config.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", model_type):
        yield f"KV cache type {cache.cache_dtype!r}: only the model's own, --kv-cache-dtype auto"
    # vLLM's CPU attention takes no other, and says so only in the worker. Since 0.33 the worker
    # chooses the default, too.
    is_chosen = current_platform.is_cpu() and cache.user_specified_block_size
    if is_chosen and cache.block_size % 32:
        yield f"block size {cache.block_size}: use a multiple of 32; the default is 128"
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline parallel size {parallel.pipeline_parallel_size}: only the last stage has "
            "the hidden states that heads read, and the tree's positions and masks would be needed "
            "on every stage. Use tensor parallelism"
        )
    if parallel.data_parallel_size > 1:
        yield (
            f"data parallel size {parallel.data_parallel_size}: replicas of a model without "
            "experts share nothing. Start separate servers, or Ray Serve (examples/ray_serve.py)"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism"
    yield from _executor_problems(parallel)
    yield from _connector_problems(config)
    if parallel.worker_cls not in (*WORKERS, *WORKERS.values()):
        yield f"worker class {parallel.worker_cls}: medusa needs its own, leave --worker-cls out"
    off = {
        "LoRA (--enable-lora)": config.lora_config is not None,
        "an encoder-cache connector": config.ec_transfer_config is not None,
        "expert-parallel load balancing (--enable-eplb)": parallel.enable_eplb,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "asynchronous scheduling on the V1 runner (--async-scheduling)": bool(
            config.scheduler_config.async_scheduling and not config.use_v2_model_runner
        ),
        "--enable-batch-sharded-sampling": parallel.enable_batch_sharded_sampling,
        "--return-sampling-mask": config.model_config.return_sampling_mask,
        "--enable-trace-replay": config.model_config.enable_trace_replay,
    }
    for feature, is_on in off.items():
        if is_on:
            yield f"{feature}: not supported, leave it out"


def _connector_problems(config: VllmConfig) -> Iterator[str]:
    transfer, scheduler = config.kv_transfer_config, config.scheduler_config
    if transfer is None or transfer.kv_connector is None:
        return
    name = transfer.kv_connector
    # A module of one's own may hold another connector of that name.
    if transfer.kv_connector_module_path is not None or name not in TESTED_CONNECTORS:
        yield (
            f"KV connector {name!r}: tested is {', '.join(TESTED_CONNECTORS)} of vLLM, which saves "
            "prompts only; another could save rows of a tree that are not the text. Leave "
            "--kv-transfer-config (or --kv-offloading-size) out"
        )
        return
    # Where vLLM's example saves or loads what is not the prompt's, without speculation, too.
    wrong_with = {
        "chunked prefill, where it saves what was not read yet: --no-enable-chunked-prefill": (
            scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold > 0
        ),
        "tensor parallelism, where all ranks write to the same files: leave one out": (
            config.parallel_config.tensor_parallel_size > 1
        ),
        "prompt embeddings, as it knows prompts by their token ids: leave one out": (
            config.model_config.enable_prompt_embeds
        ),
    }
    for reason, is_on in wrong_with.items():
        if is_on:
            yield f"KV connector {name!r} with {reason}"


def _executor_problems(parallel: ParallelConfig) -> Iterator[str]:
    backend = parallel.distributed_executor_backend
    if backend not in (None, "mp", "uni", "ray"):
        yield f"executor {backend!r}: tested are 'mp', 'uni' and 'ray'"
    if backend != "ray":
        return
    if not current_platform.ray_device_key:
        yield (
            f"executor 'ray': vLLM runs no Ray workers on platform {current_platform.device_name}. "
            "On one machine leave --distributed-executor-backend out; replicas on a cluster start "
            "with Ray Serve (examples/ray_serve.py)"
        )
    if not envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        yield "vLLM's older Ray executor: unset VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
