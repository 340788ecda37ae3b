"""The configuration: spellings mean the same, and what is unusable is refused early and by name.

No engine is started here.
"""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import save_file
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.integration.tiny import HIDDEN, VOCAB, make_heads, make_model
from vllm_medusa import config as medusa_config
from vllm_medusa import manifest
from vllm_medusa.config import DEFAULT_NODES_CPU, MedusaSpeculativeConfig
from vllm_medusa.tree import TREE_FILE, default_tree


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return str(make_heads(tmp_path_factory.mktemp("heads"), 3))


def build(model, **options):
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128}
    return EngineArgs(model=str(model), **defaults | options).create_engine_config()


def build_medusa(model, heads, engine=None, **options):
    config = {"method": "medusa", "model": str(heads), **options}
    return build(model, speculative_config=config, **engine or {})


def from_command_line(model, *arguments):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", model, "--skip-tokenizer-init", "--max-model-len", "128"]
    args = parser.parse_args([*common, *arguments])
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def test_every_spelling_means_the_same(target, heads):
    configs = [
        from_command_line(target, "--speculative-model", f"medusa:{heads}", "--spec-tokens", "2"),
        from_command_line(target, "--spec-model", f"medusa:{heads}", "--spec-tokens", "2"),
        from_command_line(
            target, "--spec-method", "medusa", "--spec-model", heads, "--spec-tokens", "2"
        ),
        from_command_line(
            target,
            "--speculative-config",
            json.dumps({"method": "medusa", "model": heads, "num_speculative_tokens": 2}),
        ),
        build(target, spec_model=f"medusa:{heads}", spec_tokens=2),
        build(target, spec_method="medusa", spec_model=heads, spec_tokens=2),
        build(target, speculative_config={"model": f"medusa:{heads}", "num-speculative-tokens": 2}),
        build_medusa(target, heads, num_speculative_tokens=2),
    ]
    for config in configs:
        spec = config.speculative_config
        assert isinstance(spec, MedusaSpeculativeConfig)
        assert (spec.method, spec.model, spec.num_speculative_tokens) == ("medusa", heads, 2)
        assert spec.tree == configs[0].speculative_config.tree
        assert config.parallel_config.worker_cls == "vllm_medusa.runner.worker.MedusaCPUWorker"


def test_a_flag_and_the_same_key_exclude_each_other(target, heads):
    with pytest.raises(ValueError, match=r"--spec-tokens .* mutually exclusive"):
        build(
            target,
            spec_tokens=2,
            speculative_config={
                "method": "medusa", "model": heads, "num_speculative_tokens": 2,
            },
        )  # fmt: skip


def test_other_methods_are_left_to_vllm(target):
    config = build(
        target, speculative_config={"method": "ngram", "num_speculative_tokens": 2,
                                    "prompt_lookup_max": 3},
    )  # fmt: skip
    assert not isinstance(config.speculative_config, MedusaSpeculativeConfig)
    assert "medusa" not in config.parallel_config.worker_cls


def test_the_stored_tree_and_the_default(target, heads, tmp_path):
    spec = build_medusa(target, heads).speculative_config
    assert spec.token_tree == default_tree(3, DEFAULT_NODES_CPU)
    stored = make_heads(tmp_path / "heads", 3)
    tree = {"paths": [[1], [0], [0, 2], [0, 0]], "num_speculative_tokens": 3}
    (stored / TREE_FILE).write_text(json.dumps(tree))
    assert build_medusa(target, stored).speculative_config.tree == [[1], [0], [0, 2]]
    more = build_medusa(target, stored, num_speculative_tokens=4).speculative_config
    assert more.tree == [[1], [0], [0, 2], [0, 0]]
    chain = build_medusa(target, stored, tree="chain").speculative_config
    assert chain.tree == [[0], [0, 0], [0, 0, 0]]


def test_a_batch_size_schedule_is_passed_on(target, heads):
    schedule = [[1, 2, 3], [3, 64, 0]]
    spec = build_medusa(
        target, heads, num_speculative_tokens_per_batch_size=schedule
    ).speculative_config
    assert [list(entry) for entry in spec.num_speculative_tokens_per_batch_size] == schedule


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "no/such/heads"}, ["no/such/heads", "folder"]),
        ({"model": ""}, ["needs heads", "--speculative-model medusa:FOLDER"]),
        ({"tree": "no-such-file.json"}, ["tree file no-such-file.json cannot be read", "chain"]),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, ["depth 4", "holds 3 heads"]),
        ({"tree": "chain", "num_speculative_tokens": 4}, ["depth 4", "holds 3 heads"]),
        ({"tree": [[0], [1, 0]]}, ["misses the parents [1]"]),
        ({"tree": [[0], [0]]}, ["repeats the nodes [0]"]),
        ({"tree": [[VOCAB]]}, [f"rank {VOCAB}", f"holds {VOCAB} tokens"]),
        ({"tree": [[0]], "num_speculative_tokens": 2}, ["2 nodes", "holds 1"]),
        ({"num_speculative_tokens": 128}, ["128", "1 to 127"]),
        ({"num_speculative_tokens": 0}, ["0", "1 to 127"]),
        ({"num_speculative_tokens": "3"}, ["'3'", "1 to 127"]),
        ({"prompt_lookup_max": 3}, ["does not take prompt_lookup_max", "tree (", "revision ("]),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 9]]},
            ["9 nodes at batch sizes 1 to 4", "the tree holds 3"],
        ),
        ({"num_speculative_tokens_per_batch_size": [[2, 8, 3]]}, ["1"]),
        ({"num_speculative_tokens_per_batch_size": []}, ["empty"]),
        ({"rejection_sample_method": "block"}, ["'block'", "'standard' (exact)", "'typical'"]),
        ({"draft_sample_method": "gumbel"}, ["'gumbel'", "'greedy'", "'probabilistic'"]),
        (
            {"draft_sample_method": "probabilistic", "rejection_sample_method": "typical"},
            ["'probabilistic' has an exact rule of its own", "leave"],
        ),
        ({"posterior_alpha": 0.3}, ["posterior_alpha", "rejection_sample_method 'typical' only"]),
        (
            {"rejection_sample_method": "typical", "posterior_threshold": 0},
            ["posterior_threshold is 0", "above 0, at most 1"],
        ),
        (
            {"rejection_sample_method": "typical", "posterior_alpha": "0.3"},
            ["posterior_alpha is '0.3'", "above 0, at most 1"],
        ),
    ],
)  # fmt: skip
def test_unusable_options_are_refused(target, heads, options, words):
    with pytest.raises(ValueError) as error:
        build_medusa(target, **{"heads": heads} | {"heads": options.pop("model", heads)}, **options)
    for word in words:
        assert word in str(error.value)


def test_typical_acceptance_is_called_lossy(target, heads, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        medusa_config.logger, "warning_once", lambda text, *rest: warnings.append(text)
    )
    spec = build_medusa(target, heads).speculative_config
    assert spec.rejection_sample_method == "standard"
    assert not warnings
    spec = build_medusa(
        target, heads, rejection_sample_method="typical", posterior_threshold=0.2
    ).speculative_config
    assert spec.rejection_sample_method == "typical"
    assert (spec.posterior_threshold, spec.posterior_alpha) == (0.2, 0.3)
    assert "typical acceptance is lossy" in warnings[0]


def test_medusa_heads_with_another_method(target, heads):
    with pytest.raises(ValueError, match=r"asks for medusa, but the method is 'eagle'"):
        build(target, speculative_config={"method": "eagle", "model": f"medusa:{heads}"})


def test_a_rank_beyond_the_draft_vocabulary(target, tmp_path):
    heads = make_heads(tmp_path / "heads", 2, token_map=torch.arange(5))
    with pytest.raises(ValueError, match=r"rank 5, but the draft vocabulary of .* holds 5 tokens"):
        build_medusa(target, heads, tree=[[5]])


def test_heads_of_another_model(target, tmp_path):
    heads = make_heads(tmp_path / "wide", 2, hidden_size=HIDDEN * 2)
    with pytest.raises(ValueError) as error:
        build_medusa(target, heads)
    for word in (str(HIDDEN), str(HIDDEN * 2), target, str(heads)):
        assert word in str(error.value)


def test_heads_of_another_vocabulary(target, tmp_path):
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    tensors = {
        "0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN),
        "0.0.linear.bias": torch.zeros(HIDDEN),
        "0.1.weight": torch.zeros(VOCAB + 8, HIDDEN),
    }
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError) as error:
        build_medusa(target, heads)
    for word in (str(VOCAB), str(VOCAB + 8), target, str(heads)):
        assert word in str(error.value)


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("config", "architecture", "words"),
    [
        (lambda: transformers.MistralConfig(**SMALL, sliding_window=64), "MistralForCausalLM",
         "sliding-window attention"),
        (lambda: transformers.Gemma2Config(**SMALL, head_dim=32), "Gemma2ForCausalLM",
         "attention logit soft cap"),
        (lambda: transformers.GptOssConfig(**SMALL, head_dim=32, num_local_experts=4,
                                           num_experts_per_tok=2),
         "GptOssForCausalLM", "attention sinks"),
        (lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=2,
                                          n_head=4), "BloomForCausalLM", "ALiBi"),
        (lambda: transformers.DeepseekV2Config(**SMALL | {"num_key_value_heads": 4},
                                               q_lora_rank=None, kv_lora_rank=32,
                                               qk_rope_head_dim=16, qk_nope_head_dim=32,
                                               v_head_dim=32, n_routed_experts=4),
         "DeepseekV2ForCausalLM", "multi-head latent attention"),
        (lambda: transformers.MambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN,
                                          num_hidden_layers=2), "MambaForCausalLM", "Mamba"),
        (lambda: transformers.WhisperConfig(vocab_size=VOCAB, d_model=HIDDEN,
                                            max_target_positions=256),
         "WhisperForConditionalGeneration", "encoder-decoder"),
        (lambda: transformers.GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4),
         "GPT2LMHeadModel", "architecture GPT2LMHeadModel was not tested"),
    ],
)  # fmt: skip
def test_unsupported_targets_are_refused(config, architecture, words, heads, tmp_path):
    model = config()
    model.architectures = [architecture]
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(words)):
        build_medusa(tmp_path, heads)


EXAMPLE = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"


def connector(name, **more):
    """Engine arguments that ask for a KV connector."""
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", **more}}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "KV cache type 'fp8'"),
        ({"pipeline_parallel_size": 2}, "pipeline parallel size 2: only the last stage"),
        ({"data_parallel_size": 2}, "data parallel size 2"),
        ({"distributed_executor_backend": "ray"}, "runs no Ray workers on platform cpu"),
        ({"enable_lora": True, "max_num_batched_tokens": 8192}, "LoRA"),
        ({"kv_cache_dtype": "bfloat16"}, "KV cache type 'bfloat16'"),
        ({"block_size": 48}, "block size 48"),
        (connector("NixlConnector"), "KV connector 'NixlConnector': tested is ExampleConnector of"),
        ({"kv_offloading_size": 1.0}, "KV connector 'OffloadingConnector': tested is"),
        (
            connector("ExampleConnector", kv_connector_module_path=EXAMPLE),
            "KV connector 'ExampleConnector': tested is",
        ),
        (connector("ExampleConnector"), "'ExampleConnector' with chunked prefill"),
        (
            connector("ExampleConnector") | {"tensor_parallel_size": 2},
            "'ExampleConnector' with tensor parallelism",
        ),
        (
            connector("ExampleConnector") | {"enable_prompt_embeds": True},
            "'ExampleConnector' with prompt embeddings",
        ),
        ({"logits_processors": ["a.b:C"]}, "custom logits processors"),
        ({"worker_cls": "a.b.C"}, "worker class a.b.C"),
    ],
)
def test_unsupported_engines_are_refused(target, heads, engine, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build_medusa(target, heads, engine)


def test_all_problems_are_named_at_once(target, heads):
    with pytest.raises(ValueError) as error:
        build_medusa(target, heads, {"kv_cache_dtype": "fp8", "worker_cls": "a.b.C"})
    assert "KV cache type" in str(error.value)
    assert "worker class a.b.C" in str(error.value)


def test_an_untested_architecture_can_be_tried(heads, tmp_path, monkeypatch):
    model = transformers.GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4)
    model.architectures = ["GPT2LMHeadModel"]
    model.save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_MEDUSA_ALLOW_UNTESTED", "1")
    assert build_medusa(tmp_path, heads).speculative_config.num_speculative_tokens == 3


def test_another_vllm_is_refused(target, heads, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.31.0+cpu")
    with pytest.raises(RuntimeError, match=r"does not support vLLM 0\.31\.0; it supports 0\.32\.0"):
        build_medusa(target, heads)


def test_a_changed_seam_is_refused_by_name(target, heads, monkeypatch):
    seam = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample"
    real = manifest.fingerprint
    monkeypatch.setattr(
        manifest, "fingerprint", lambda name, root: "x" if name == seam else real(name, root)
    )
    with pytest.raises(RuntimeError, match=re.escape(seam)):
        build_medusa(target, heads)
    monkeypatch.setenv(manifest.SEAM_MISMATCH, "warn")
    assert build_medusa(target, heads).speculative_config is not None


# -- runners ---------------------------------------------------------------------------------------


def test_scheduling_ahead_is_refused_on_v1(target, heads):
    assert not build_medusa(target, heads).scheduler_config.async_scheduling
    with pytest.raises(ValueError, match="asynchronous scheduling on the V1 runner"):
        build_medusa(target, heads, {"async_scheduling": True})


def test_v2_on_a_cpu_is_refused(target, heads, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)  # else vLLM itself refuses first
    with pytest.raises(ValueError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        build_medusa(target, heads)


def test_medusa_does_not_push_vllm_back_to_v1(target, heads, monkeypatch):
    """What keeps this machine on V1 is that it has no Triton, and nothing else."""
    config = build_medusa(target, heads)
    assert not config.use_v2_model_runner
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    assert config.use_v2_model_runner
    # vLLM itself would say that its V2 runner has no Medusa.
    stock = config._get_v2_model_runner_unsupported_features.__func__.__wrapped__
    assert stock(config) == ["speculative method 'medusa'"]
