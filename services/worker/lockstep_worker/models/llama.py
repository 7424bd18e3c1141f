"""The Llama family: Llama, SmolLM2, Mistral (full attention), Qwen2 (biases on q, k, v), Qwen3 (norms on q and k heads)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep_kernels.attention import PagedBatch, attention, prepare
from lockstep_kernels.linear import Packed, linear, pack
from lockstep_kernels.rms_norm import rms_norm
from lockstep_kernels.rope import kv_rows, rotate_, store_kv
from lockstep_kernels.swiglu import pack_gate_up, swiglu
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models.layers import (
    AttentionWeights,
    LayerWeights,
    Rope,
    check_full_attention,
    config_hash,
    padded_rows,
    read_rope,
)
from lockstep_worker.weights import Checkpoint, ConfigFile, Progress

IGNORED = (".rotary_emb.inv_freq",)  # stored by old checkpoints, follows from the config


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model of this family; its fields are those of config.json, checked."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool

    @property
    def rotated_heads(self) -> int:
        """Query and key heads."""
        return self.heads + self.kv_heads


def read_config(config: ConfigFile) -> LlamaConfig:
    """Raises ConfigError naming the field that is missing or that this family does not have."""
    architecture = config.get("architectures")[0]
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} query heads")
    head_dim = config.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise config.error("head_dim", f"is {head_dim}, expected an even number")
    activation = config.get("hidden_act")
    if activation not in ("silu", "swish"):
        raise config.error("hidden_act", f"is {activation!r}, expected 'silu'")
    max_positions = config.integer("max_position_embeddings")
    check_full_attention(config, max_positions)
    attention_bias = config.flag("attention_bias", False)
    return LlamaConfig(
        architecture,
        config.integer("vocab_size"),
        hidden,
        config.integer("intermediate_size"),
        config.integer("num_hidden_layers"),
        heads,
        kv_heads,
        head_dim,
        max_positions,
        config.number("rms_norm_eps", 1e-6),
        read_rope(config),
        config.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        out_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=config.flag("mlp_bias", False),
        head_norms=architecture == "Qwen3ForCausalLM",
    )


class Llama:
    """See `lockstep_worker.models.Model`."""

    routed_experts = False

    def __init__(
        self,
        config: LlamaConfig,
        digest: str,
        embedding: torch.Tensor,
        layers: tuple[LayerWeights, ...],
        final_norm: torch.Tensor,
        head: Packed,
        deterministic: bool,
    ) -> None:
        self.name = config.architecture
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_positions
        self.config_hash = digest
        self._config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._deterministic = deterministic
        self._dtype = head.dtype  # of hidden states; the KV cache keeps the weights'
        tables = config.rope.tables(config.max_positions, config.head_dim, self._dtype)
        self._cos, self._sin = (table.to(embedding.device) for table in tables)

    def kv_specs(self) -> tuple[KvSpec, ...]:
        c = self._config
        return (KvSpec("full", c.layers, c.kv_heads, c.head_dim, self._embedding.dtype),)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        c = self._config
        tokens, wanted = inputs.token_ids.shape[0], inputs.logits_index.shape[0]
        if tokens == 0:
            return self._embedding.new_empty(0, c.hidden, dtype=self._dtype)
        rows = padded_rows(tokens, self._head.layout, self._deterministic)
        positions = _padded(inputs.positions, rows)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = torch.nn.functional.embedding(_padded(inputs.token_ids, rows), self._embedding).to(self._dtype)
        mixed = hidden.new_zeros(rows, c.heads * c.head_dim)
        batch = PagedBatch(inputs.query_lens, inputs.host_seq_lens, inputs.block_tables[0], kv.block_size)
        prepared = prepare(
            batch,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            dtype=self._embedding.dtype,
            device=mixed.device,
        )
        stored = kv_rows(inputs.slots[0], c.kv_heads, kv.block_size)
        for i, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.attention_norm, c.eps)
            qkv = linear(normed, layer.attention.qkv).view(rows, -1, c.head_dim)
            rotated = qkv[:, : c.rotated_heads]
            if layer.attention.head_gains is not None:
                rotated.copy_(rms_norm(rotated, layer.attention.head_gains, c.eps))
            rotate_(rotated, cos, sin)
            cache = kv.layer(0, i)
            store_kv(qkv[:tokens, c.heads :], cache, stored)
            attention(qkv[:tokens, : c.heads], cache, prepared, scale=c.head_dim**-0.5, out=mixed)
            if i == c.layers - 1:  # nothing after it reads the other tokens
                kept = inputs.logits_index.repeat(2) if wanted == 1 and rows > 1 else inputs.logits_index
                mixed, hidden = mixed[kept], hidden[kept]
            hidden = linear(mixed, layer.attention.out, plus=hidden)
            gated = swiglu(rms_norm(hidden, layer.mlp_norm, c.eps), layer.gate_up)
            hidden = linear(gated, layer.down, plus=hidden)
        return rms_norm(hidden, self._final_norm, c.eps)[:wanted]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self._head).float()


def load(
    config: ConfigFile,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    progress: Progress,
) -> Llama:
    """Streams the weights in, a layer at a time."""
    c = read_config(config)

    def take(name: str, *shape: int) -> torch.Tensor:
        """Gains of norms stay float32, as `rms_norm` computes in it."""
        return checkpoint.take(name, shape, torch.float32 if name.endswith("norm.weight") else dtype).to(device)

    steps = c.layers + 2
    embedding = take("model.embed_tokens.weight", c.vocab_size, c.hidden)
    progress(1 / steps)
    layers = []
    for i in range(c.layers):
        layers.append(_load_layer(c, f"model.layers.{i}.", take))
        progress((i + 2) / steps)
    final_norm = take("model.norm.weight", c.hidden)
    head = embedding if c.tied else take("lm_head.weight", c.vocab_size, c.hidden)
    checkpoint.check_all_taken(IGNORED + (("lm_head.weight",) if c.tied else ()))
    model = Llama(
        c, config_hash(config, checkpoint, dtype), embedding, tuple(layers), final_norm, pack(head), deterministic
    )
    progress(1.0)
    return model


def _load_layer(c: LlamaConfig, prefix: str, take: Callable[..., torch.Tensor]) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    sizes = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}

    def bias(present: bool, name: str, size: int) -> torch.Tensor | None:
        return take(f"{name}.bias", size) if present else None

    qkv = torch.cat([take(f"{attention}{x}_proj.weight", size, c.hidden) for x, size in sizes.items()])
    qkv_bias = torch.cat([take(f"{attention}{x}_proj.bias", size) for x, size in sizes.items()]) if c.qkv_bias else None
    out = take(f"{attention}o_proj.weight", c.hidden, sizes["q"])
    gains = None
    if c.head_norms:
        q_gain, k_gain = (take(f"{attention}{x}_norm.weight", c.head_dim) for x in "qk")
        gains = torch.cat((q_gain.expand(c.heads, -1), k_gain.expand(c.kv_heads, -1)))
    return LayerWeights(
        attention_norm=take(f"{prefix}input_layernorm.weight", c.hidden),
        attention=AttentionWeights(
            pack(qkv, qkv_bias), pack(out, bias(c.out_bias, f"{attention}o_proj", c.hidden)), gains
        ),
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", c.hidden),
        gate_up=pack_gate_up(
            take(f"{mlp}gate_proj.weight", c.intermediate, c.hidden),
            take(f"{mlp}up_proj.weight", c.intermediate, c.hidden),
            bias(c.mlp_bias, f"{mlp}gate_proj", c.intermediate),
            bias(c.mlp_bias, f"{mlp}up_proj", c.intermediate),
        ),
        down=pack(
            take(f"{mlp}down_proj.weight", c.hidden, c.intermediate),
            bias(c.mlp_bias, f"{mlp}down_proj", c.hidden),
        ),
    )


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[T] int64, followed by zeros up to [rows]."""
    return torch.nn.functional.pad(values, (0, rows - values.shape[0]))
