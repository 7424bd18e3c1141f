"""A GGUF file of the Llama family becomes a directory in Hugging Face's format that workers and routers load.

Written: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and, if the file
has a chat template, chat_template.jinja. Whatever the file holds that would be lost is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from lockstep_common.errors import ConfigError

F32 = npt.NDArray[np.float32]

_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type
_USER_TOKEN = 4

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(
    source: Path,
    target: Path,
    dtype: Literal["bfloat16", "float32"],
    generation: Mapping[str, float | bool],
    progress: Callable[[float], None],
) -> None:
    """Writes the model of the GGUF file `source` into the directory `target`; ConfigError names the field at fault.

    `generation` goes into generation_config.json beside the special tokens: default sampling values.
    """
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise ConfigError(f"{source}: not a GGUF file: {error}") from error
    fields = _Fields(source, reader)
    config = _model_config(fields, dtype, tied=all(t.name != "output.weight" for t in reader.tensors))
    _write_weights(reader, fields, config, target / "model.safetensors", dtype, progress)
    _write_json(target / "config.json", config)
    special = {"bos_token_id", "eos_token_id", "pad_token_id"}
    ids = {key: value for key, value in config.items() if key in special}
    _write_json(target / "generation_config.json", {**ids, **generation})
    _write_tokenizer(fields, target)


class _Fields:
    """Typed access to a GGUF file's key-value pairs."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def need(self, key: str) -> Any:
        if key not in self._fields:
            raise ConfigError(f"{self.path}: field {key} is missing")
        return self._fields[key].contents()

    def real(self, key: str) -> float:
        """A float32 field as the shortest decimal that means it (1e-05, not 9.999999747378752e-06)."""
        return float(str(np.float32(self.need(key))))

    def expect(self, key: str, *allowed: Any) -> None:
        value = self.get(key)
        if value not in allowed:
            known = ", ".join(str(a) for a in allowed if a is not None)
            raise ConfigError(f"{self.path}: {key} is {value!r}; supported: {known or 'none'}")


def _model_config(fields: _Fields, dtype: str, *, tied: bool) -> dict[str, Any]:
    fields.expect("general.architecture", "llama")
    fields.expect("llama.rope.scaling.type", None, "none")
    fields.expect("llama.expert_count", None, 0)
    hidden, heads = fields.need("llama.embedding_length"), fields.need("llama.attention.head_count")
    theta = fields.real("llama.rope.freq_base")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": dtype,
        "vocab_size": len(fields.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": fields.need("llama.feed_forward_length"),
        "num_hidden_layers": fields.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": fields.need("llama.context_length"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rms_norm_eps": fields.real("llama.attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    for name in ("bos", "eos", "padding"):
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{name.removesuffix('ding')}_token_id"] = token
    return config


def _write_weights(
    reader: GGUFReader,
    fields: _Fields,
    config: dict[str, Any],
    target: Path,
    dtype: Literal["bfloat16", "float32"],
    progress: Callable[[float], None],
) -> None:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, npt.NDArray[Any]] = {}
    specs: dict[str, TensorSpec] = {}  # they point into `tensors`
    for count, tensor in enumerate(reader.tensors, start=1):
        name, kind = _hf_name(tensor.name, fields.path)
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)  # [out, in] or [width]
        if kind in heads:
            weight = _half_split_rope(weight, heads[kind])
        packed = bfloat16_bits(weight) if dtype == "bfloat16" else np.ascontiguousarray(weight)
        tensors[name] = packed
        specs[name] = TensorSpec(dtype=dtype, shape=packed.shape, data_ptr=packed.ctypes.data, data_len=packed.nbytes)
        progress(count / len(reader.tensors))
    expected = len(_LAYER_NAMES) * config["num_hidden_layers"] + len(_TOP_NAMES) - config["tie_word_embeddings"]
    if len(tensors) != expected:
        raise ConfigError(f"{fields.path}: {len(tensors)} weights, expected {expected}: the file is not complete")
    serialize_file(specs, str(target), {"format": "pt"})
    target.chmod(0o644)


def _hf_name(name: str, path: Path) -> tuple[str, str]:
    """(Hugging Face's name, kind) of a GGUF tensor."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, kind = match.groups()
        if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight", kind
    kind = name.removesuffix(".weight")
    if kind in _TOP_NAMES and kind != name:
        return f"{_TOP_NAMES[kind]}.weight", kind
    raise ConfigError(f"{path}: tensor {name} has no place in a Llama model that we can serve")


def _half_split_rope(weight: F32, heads: int) -> F32:
    """Rows [heads * d, in] from GGUF's order (rotated pairs side by side) to Hugging Face's (first halves, then second)."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def bfloat16_bits(values: F32) -> npt.NDArray[np.uint16]:
    """The bit patterns of float32 values rounded to bfloat16, nearest even, as torch rounds; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _write_tokenizer(fields: _Fields, target: Path) -> None:
    fields.expect("tokenizer.ggml.model", "gpt2")
    fields.expect("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    _build_tokenizer(fields, tokens).save(str(target / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.need("llama.context_length"),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None:
            config[f"{key}_token"] = tokens[token]
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
        (target / "chat_template.jinja").write_text(template)
    _write_json(target / "tokenizer_config.json", config)


def _build_tokenizer(fields: _Fields, tokens: list[str]) -> Tokenizer:
    """Byte-level BPE; "smollm" splits single digits first, which changes the ids of ordinary text if it is left out."""
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.need("tokenizer.ggml.token_type")
    for kind, add in ((_CONTROL_TOKEN, tokenizer.add_special_tokens), (_USER_TOKEN, tokenizer.add_tokens)):
        add(
            [
                AddedToken(token, special=kind == _CONTROL_TOKEN, normalized=False)
                for token, its_kind in zip(tokens, types, strict=True)
                if its_kind == kind
            ]
        )
    if fields.get("tokenizer.ggml.add_bos_token", False):
        bos = fields.need("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=None, special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
