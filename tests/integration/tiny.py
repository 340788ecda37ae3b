"""Tiny target models with random weights, and heads for them, made by the tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 256
HIDDEN = 64


def make_model(
    folder: Path,
    kind: str = "llama",
    *,
    vocab_size: int = VOCAB,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    max_position_embeddings: int = 1024,
    seed: int = 0,
    **overrides: object,
) -> Path:
    """Save a two-layer model. Large initial weights make its text lively and its top logits
    distinct."""
    import transformers

    config_class = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    options: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "mistral":
        options["sliding_window"] = None
    if kind == "qwen2":
        del options["head_dim"]  # Qwen2 derives it: hidden / heads
        options["num_attention_heads"], options["num_key_value_heads"] = 2, 1
    config = config_class(**options | overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def make_repeating_model(folder: Path) -> Path:
    """Save a target that tends to repeat its last token: then heads that do nothing guess well."""
    import transformers

    target = transformers.AutoModelForCausalLM.from_pretrained(make_model(folder))
    with torch.no_grad():
        # A strong identity from embedding to output, weakened layers between.
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight *= 0.07
            layer.mlp.down_proj.weight *= 0.07
        target.lm_head.weight.copy_(target.model.embed_tokens.weight)
    target.save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path) -> Path:
    """Save a tokenizer beside a model: tokens 32 to 126 are ASCII characters, others are words."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {chr(i) if 32 <= i < 127 else f"<{i}>": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


# Tokens of the byte-level tokenizer that a reasoning parser looks for.
THINK, END_OF_THINKING = 3, 4


def add_byte_tokenizer(folder: Path) -> Path:
    """Save a byte-level tokenizer beside a model, as grammars want it.

    Tokens 5 to 126 are the bytes; those behind are pieces of JSON of several characters, so that a
    token can end one part of a grammar and begin the next.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    signs = bytes_to_unicode()
    words = ["<unk>", "<s>", "</s>", "<think>", "</think>"]
    special, pieces = list(words), [bytes([byte]) for byte in range(len(words), 127)]
    pieces += [piece.encode() for piece in JSON_PIECES]
    pieces += [str(number).encode() for number in range(10, 100)]
    words += ["".join(signs[byte] for byte in piece) for piece in pieces]
    words += [signs[byte] for byte in range(0x80, 0x80 + VOCAB - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


JSON_PIECES = [
    '{"', '"}', '":', '": ', '", ', '","', '":"', '},', "],", "[[", "[]", "{}", "true", "false",
    "null", ' "', '["', '"]', "ab", "ba", "aab", "\u00e9",
]  # fmt: skip


def make_heads(
    folder: Path,
    num_heads: int,
    *,
    hidden_size: int = HIDDEN,
    token_map: torch.Tensor | None = None,
    seed: int = 0,
) -> Path:
    """Save random heads in the format "version": "2" (residual blocks, the target's LM head)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(
            hidden_size, hidden_size, generator=generator
        )
        tensors[f"{head}.0.linear.bias"] = torch.randn(hidden_size, generator=generator)
    if token_map is not None:
        tensors["token_map"] = token_map
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(
        f'{{"version": "2", "medusa_num_heads": {num_heads}, "medusa_num_layers": 1}}'
    )
    return folder


def idle_heads(num_heads: int) -> dict[str, torch.Tensor]:
    """Tensors of heads that do nothing, in the format "version": "2": they guess what the target
    says next once more."""
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
    return tensors


def save_heads(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    """Save tensors and config of heads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
