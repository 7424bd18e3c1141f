"""A tiny GGUF file, written here, converted, and read back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from lockstep_cli import models
from lockstep_cli.convert import bfloat16_bits, convert_gguf
from lockstep_common.errors import ConfigError

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN = 2, 64, 4, 2, 96
HEAD_DIM = HIDDEN // HEADS
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MERGES = ["h e", "l l", "he ll"]
SHAPES = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (FFN, HIDDEN),
    "ffn_up": (FFN, HIDDEN),
    "ffn_down": (HIDDEN, FFN),
}
Weights = dict[str, npt.NDArray[np.float32]]


def byte_letters() -> list[str]:
    """The 256 letters of byte-level BPE."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


VOCABULARY = ["<|endoftext|>", "<|start|>", "<|end|>", *byte_letters(), "he", "ll", "hell", "<user>"]
TYPES = [3, 3, 3, *[1] * (256 + 3), 4]


def weights() -> Weights:
    """Values that survive Q8_0 exactly as `dequantize` gives them back."""
    rng = np.random.default_rng(7)
    result = {"token_embd.weight": rng.normal(size=(len(VOCABULARY), HIDDEN)).astype(np.float32)}
    result["output_norm.weight"] = rng.normal(size=HIDDEN).astype(np.float32)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            result[f"blk.{layer}.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    return result


def write_gguf(path: Path, tensors: Weights, **changes: object) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_tokenizer_model(str(changes.get("tokenizer", "gpt2")))
    writer.add_tokenizer_pre(str(changes.get("pre", "smollm")))
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(bool(changes.get("add_bos", False)))
    writer.add_chat_template(TEMPLATE)
    if "scaling" in changes:
        writer.add_string("llama.rope.scaling.type", str(changes["scaling"]))
    for name, values in tensors.items():
        if values.ndim == 2:
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_stored(values: npt.NDArray[np.float32]) -> torch.Tensor:
    """What the file really holds: matrices went through Q8_0."""
    if values.ndim == 2:
        packed = quantize(values, GGMLQuantizationType.Q8_0)
        values = dequantize(packed, GGMLQuantizationType.Q8_0)
    return torch.from_numpy(values)


def convert(tmp_path: Path, tensors: Weights, dtype: str = "bfloat16", **changes: object) -> Path:
    target = tmp_path / "out"
    target.mkdir()
    source = write_gguf(tmp_path / "tiny.gguf", tensors, **changes)
    convert_gguf(source, target, dtype, {"temperature": 0.2}, lambda fraction: None)  # type: ignore[arg-type]
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_and_config(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights()
    target = convert(tmp_path, tensors, str(dtype).removeprefix("torch."))
    loaded = load_file(target / "model.safetensors")
    assert len(loaded) == 2 + LAYERS * len(SHAPES)
    assert all(tensor.dtype is dtype for tensor in loaded.values())
    embedding = as_stored(tensors["token_embd.weight"]).to(dtype)
    assert torch.equal(loaded["model.embed_tokens.weight"], embedding)
    down = as_stored(tensors["blk.1.ffn_down.weight"]).to(dtype)
    assert torch.equal(loaded["model.layers.1.mlp.down_proj.weight"], down)
    config = json.loads((target / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e5 and config["tie_word_embeddings"] is True
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (
        KV_HEADS,
        HEAD_DIM,
        len(VOCABULARY),
    )
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "temperature": 0.2}
    assert (target / "chat_template.jinja").read_text() == TEMPLATE


def test_queries_and_keys_return_to_half_split_order(tmp_path: Path) -> None:
    """GGUF's row 2j of a head is Hugging Face's row j, and 2j + 1 is d/2 + j."""
    tensors = weights()
    loaded = load_file(convert(tmp_path, tensors, "float32") / "model.safetensors")
    stored = as_stored(tensors["blk.0.attn_k.weight"])
    half = HEAD_DIM // 2
    for head in range(KV_HEADS):
        first = head * HEAD_DIM
        rows = loaded["model.layers.0.self_attn.k_proj.weight"][first : first + HEAD_DIM]
        for j in range(half):
            assert torch.equal(rows[j], stored[first + 2 * j]) and torch.equal(
                rows[half + j], stored[first + 2 * j + 1]
            )


def test_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert(tmp_path, weights()) / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hell", "o"]
    assert tokenizer.encode("12").tokens == ["1", "2"]
    assert tokenizer.encode("<|start|>hell<user>").ids == [1, VOCABULARY.index("hell"), len(VOCABULARY) - 1]
    for text in ("héllo wörld", "日本語 🙂", " \t\n x", "a1b22 c"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.decode([1, VOCABULARY.index("hell"), 2]) == "hell", "control tokens are not text"


def test_a_beginning_token_is_added_if_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert(tmp_path, weights(), add_bos=True) / "tokenizer.json"))
    assert tokenizer.encode("hell").ids == [1, VOCABULARY.index("hell")]


def test_the_result_is_what_transformers_reads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = convert(tmp_path, weights())
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype is torch.bfloat16 and model.config.num_hidden_layers == LAYERS
    ids = AutoTokenizer.from_pretrained(target)("hello 42")["input_ids"]
    assert ids == Tokenizer.from_file(str(target / "tokenizer.json")).encode("hello 42").ids


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tokenizer": "llama"}, "tokenizer.ggml.model"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre"),
        ({"scaling": "yarn"}, "llama.rope.scaling.type"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(tmp_path: Path, changes: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        convert(tmp_path, weights(), "bfloat16", **changes)


def test_tensors_that_have_no_place_and_missing_ones_are_refused(tmp_path: Path) -> None:
    extra = weights() | {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32)}
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.bias"):
        convert(tmp_path, extra)
    missing = weights()
    del missing["blk.1.ffn_up.weight"]
    (tmp_path / "again").mkdir()
    with pytest.raises(ConfigError, match="not complete"):
        convert(tmp_path / "again", missing)


def test_what_is_no_gguf_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"hello, this is no model at all")
    with pytest.raises(ConfigError, match=r"x\.gguf"):
        convert_gguf(path, tmp_path, "bfloat16", {}, lambda fraction: None)


def test_bfloat16_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edge = np.array([0.0, -0.0, np.inf, -np.inf, 3.4028235e38, 1e-45, 1.00390625, 1.01171875], np.float32)
    values = np.concatenate([values[~np.isnan(values)], edge])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (bfloat16_bits(values) == expected).all()
    assert np.isnan((bfloat16_bits(np.array([np.nan], np.float32)).astype(np.uint32) << 16).view(np.float32)).all()


def test_a_gguf_file_becomes_a_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "tiny.gguf", weights())
    seen: list[float] = []
    directory = models.get(str(source), lambda label, fraction, note="": seen.append(fraction))
    assert directory == models.directory_of("tiny") and seen[-1] == 1.0
    assert models.resolve("tiny", lambda *_: None) == directory
    assert models.cached() == [directory]
    assert [p.name for p in models.models_root().iterdir() if p.name.startswith(".")] == [".lock"], "nothing half done"


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    source = write_gguf(tmp_path / "tiny.gguf", weights(), pre="unknown")
    with pytest.raises(ConfigError):
        models.get(str(source), lambda *_: None)
    assert [path.name for path in models.models_root().iterdir()] == [".lock"]


def test_unknown_names_list_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    for ask in (models.resolve, models.get):
        with pytest.raises(ConfigError, match=models.DEFAULT_MODEL):
            ask("no-such-model", lambda *_: None)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        models.resolve(str(tmp_path), lambda *_: None)
