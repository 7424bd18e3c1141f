"""A tiny Llama in Hugging Face's format with random weights: small enough for every test, odd enough to find faults.

Two EOS ids, grouped-query attention, tied embeddings off, fp32. The same seed gives the same bytes. Written without
transformers, so that what reads it is checked against it independently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lockstep_bench.tokenizer import SPECIALS, write_tokenizer


@dataclass(frozen=True)
class Shape:
    vocab: int = 320
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 128
    max_model_len: int = 1024


def make_tiny_model(directory: Path, *, seed: int = 0, shape: Shape = Shape()) -> Path:
    """Writes config.json, model.safetensors and the tokenizer's files; returns the directory."""
    write_tokenizer(directory, vocab_size=shape.vocab, max_model_len=shape.max_model_len)
    (directory / "config.json").write_text(json.dumps(config(shape), indent=1) + "\n")
    save_file(weights(shape, seed), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def special_ids(shape: Shape = Shape()) -> dict[str, int]:
    """Ids of <s>, </s> and <|end|>: the last of the vocabulary."""
    return {token: shape.vocab - len(SPECIALS) + i for i, token in enumerate(SPECIALS)}


def config(shape: Shape) -> dict[str, Any]:
    bos, *eos = special_ids(shape).values()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Drawn in a fixed order. The scales keep logits apart, so that greedy answers are not near ties and do not repeat at once."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * scale

    d, head = shape.hidden, shape.hidden // shape.heads
    tensors = {"model.embed_tokens.weight": draw(shape.vocab, d, scale=1.0)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "self_attn.q_proj.weight": draw(shape.heads * head, d, scale=2 / d**0.5),
            layer + "self_attn.k_proj.weight": draw(shape.kv_heads * head, d, scale=2 / d**0.5),
            layer + "self_attn.v_proj.weight": draw(shape.kv_heads * head, d, scale=2 / d**0.5),
            layer + "self_attn.o_proj.weight": draw(d, shape.heads * head, scale=2 / d**0.5),
            layer + "mlp.gate_proj.weight": draw(shape.ffn, d, scale=2 / d**0.5),
            layer + "mlp.up_proj.weight": draw(shape.ffn, d, scale=2 / d**0.5),
            layer + "mlp.down_proj.weight": draw(d, shape.ffn, scale=2 / shape.ffn**0.5),
            layer + "input_layernorm.weight": 1 + draw(d, scale=0.1),
            layer + "post_attention_layernorm.weight": 1 + draw(d, scale=0.1),
        }
    tensors["model.norm.weight"] = 1 + draw(d, scale=0.1)
    tensors["lm_head.weight"] = draw(shape.vocab, d, scale=4 / d**0.5)
    return tensors
