"""A decoder of pre-norm layers with grouped-query attention. A family adds the second half of its layers: its feed-forward part.

hidden += out(attention(rope(qkv(norm(hidden)))))      AttentionBlock
hidden += feed_forward(norm(hidden))                   FeedForward, the family's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lockstep_common.errors import ConfigError, Unsupported
from lockstep_common.steps import Kind
from lockstep_kernels import rope
from lockstep_kernels.attention import PagedBatch, Prepared, attention, prepare
from lockstep_kernels.fp8 import BLOCK, E4M3, Fp8Weight, dequantise
from lockstep_kernels.linear import Packed, linear, pack, pack_fp8
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.swiglu import GateUp, pack_gate_up, pack_gate_up_fp8, swiglu
from lockstep_worker.collectives import Group
from lockstep_worker.inputs import StepInputs, one_token_each
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models.layers import Rope, check_full_attention, config_hash, padded_rows, read_rope
from lockstep_worker.quantisation import Scales, read_quantisation
from lockstep_worker.weights import Checkpoint, ConfigFile, Progress

IGNORED = (".rotary_emb.inv_freq",)  # stored by old checkpoints, follows from the config


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape that all families share; the fields are those of config.json, checked."""

    architecture: str
    vocab_size: int
    hidden: int
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
    head_norms: bool


def read_decoder(
    config: ConfigFile, *, qkv_bias: bool, out_bias: bool, head_norms: bool, partial: float | None = None
) -> DecoderConfig:
    """Raises ConfigError naming the field that is missing or not supported. `partial`: see `read_rope`."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} query heads")
    head_dim = config.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise config.error("head_dim", f"is {head_dim}, expected an even number")
    angles = read_rope(config, partial=partial)
    if (rotated := angles.rotary_dim(head_dim)) % 2 or not rotated:
        raise config.error("partial_rotary_factor", f"makes {rotated} of {head_dim} elements, expected an even number")
    activation = config.get("hidden_act")
    if activation not in ("silu", "swish"):
        raise config.error("hidden_act", f"is {activation!r}, expected 'silu'")
    max_positions = config.integer("max_position_embeddings")
    check_full_attention(config, max_positions)
    return DecoderConfig(
        config.get("architectures")[0],
        config.integer("vocab_size"),
        hidden,
        config.integer("num_hidden_layers"),
        heads,
        kv_heads,
        head_dim,
        max_positions,
        config.number("rms_norm_eps", 1e-6),
        angles,
        config.flag("tie_word_embeddings", False),
        qkv_bias,
        out_bias,
        head_norms,
    )


@dataclass(frozen=True, slots=True)
class KvScale:
    """What a cache of 8 bits keeps of a layer is divided by: float32 for each head, of keys and of values."""

    both: torch.Tensor  # [2, h]
    each: tuple[torch.Tensor, torch.Tensor]  # its rows


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """qkv: query heads, then key heads, then value heads. `head_norm` has a gain [H + h, d] for each query and key head.

    `kv_scale` counts if the cache is of 8 bits; None: 1.
    """

    norm: Norm
    qkv: Packed
    out: Packed
    head_norm: Norm | None
    kv_scale: KvScale | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a feed-forward part may ask about the R rows of hidden states it is given."""

    kind: Kind
    live: torch.Tensor | None  # [R] bool: rows of living sequences, the others are routed to no expert; None: all

    def of(self, kept: torch.Tensor) -> Tokens:
        """Of the rows `kept` only."""
        return self if self.live is None else Tokens(self.kind, self.live[kept])


class FeedForward(Protocol):
    """The second half of a layer: norm, feed-forward part, residual."""

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """[R, d] of hidden [R, d], which may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The dense feed-forward part: down(silu(gate(x)) * up(x))."""

    norm: Norm
    gate_up: GateUp
    down: Packed

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return linear(swiglu(hidden, self.gate_up, norm=self.norm), self.down, plus=hidden)


class AttentionHalf(Protocol):
    """What a layer's attention half needs of its weights; a family may have another half than `AttentionWeights`."""

    @property
    def qkv(self) -> Packed:
        """The product that hidden states meet first; all linears of a model take operands of the same dtypes."""


class Pass(Protocol):
    """What all layers of one pass share, and the way through their attention halves."""

    def attend(
        self, weights: Any, hidden: torch.Tensor, cache: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `AttentionPass.attend`; `weights` are the attention half of a layer of this family."""


@dataclass(frozen=True, slots=True)
class Layer:
    attention: AttentionHalf
    feed_forward: FeedForward


class WeightSource:
    """The tensors of a checkpoint on the device, as ops take them.

    Weights of 8 bits stay so where products take them (`linear`, `gate_up`); where a plain tensor is asked for, it is the one
    that values and scales stand for.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        eps: float,
        deterministic: bool,
        scales: Scales | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.deterministic = deterministic
        self.dtype = dtype
        self.device = device
        self._eps = eps
        self._scales = scales

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """In the model's dtype unless another is asked for."""
        if self.checkpoint.quantised(name):
            return dequantise(self._fp8(name, *shape), dtype or self.dtype)
        return self.checkpoint.take(name, shape, dtype or self.dtype).to(self.device)

    def weight(self, name: str, rows: int, columns: int) -> torch.Tensor | Fp8Weight:
        """As products take it: of 8 bits if it is stored so."""
        quantised = self.checkpoint.quantised(name)
        return self._fp8(name, rows, columns) if quantised else self.tensor(name, rows, columns)

    def norm(self, name: str, size: int) -> Norm:
        """`name`.weight and the model's eps."""
        return Norm(self.tensor(f"{name}.weight", size, dtype=torch.float32), self._eps)

    def linear(self, names: Sequence[str], sizes: Sequence[int], in_features: int, *, bias: bool = False) -> Packed:
        """Products of one operand as one: `names`[i].weight [sizes[i], in_features], and biases."""
        biases = self._bias(names, sizes) if bias else None
        if self._are_fp8(names, sizes):
            parts = [self._fp8(f"{n}.weight", size, in_features) for n, size in zip(names, sizes, strict=True)]
            both = Fp8Weight(_joined([part.values for part in parts]), _joined([part.scale for part in parts]))
            return pack_fp8(both, biases, self.dtype, deterministic=self.deterministic)
        weights = [self.tensor(f"{n}.weight", size, in_features) for n, size in zip(names, sizes, strict=True)]
        return pack(_joined(weights), biases, deterministic=self.deterministic)

    def gate_up(self, prefix: str, size: int, in_features: int, *, bias: bool = False) -> GateUp:
        """`prefix`gate_proj and `prefix`up_proj [size, in_features]."""
        names = [f"{prefix}{n}_proj" for n in ("gate", "up")]
        if not bias and self._are_fp8(names, [size, size]):
            gate8, up8 = (self._fp8(f"{n}.weight", size, in_features) for n in names)
            return pack_gate_up_fp8(gate8, up8, self.dtype, deterministic=self.deterministic)
        gate, up = (self.tensor(f"{n}.weight", size, in_features) for n in names)
        biases = (self._bias([n], [size]) for n in names) if bias else ()
        return pack_gate_up(gate, up, *biases, deterministic=self.deterministic)

    def mlp(self, norm: str, prefix: str, hidden: int, size: int, *, bias: bool = False) -> GatedMlp:
        """The dense feed-forward part behind the norm of that name: `prefix`{gate,up,down}_proj."""
        return GatedMlp(
            self.norm(norm, hidden),
            self.gate_up(prefix, size, hidden, bias=bias),
            self.linear([f"{prefix}down_proj"], [hidden], size, bias=bias),
        )

    def attention(self, c: DecoderConfig, prefix: str) -> AttentionWeights:
        """The attention half of the layer `prefix`."""
        attention = prefix + "self_attn."
        sizes = [heads * c.head_dim for heads in (c.heads, c.kv_heads, c.kv_heads)]
        qkv = self.linear([f"{attention}{x}_proj" for x in "qkv"], sizes, c.hidden, bias=c.qkv_bias)
        out = self.linear([f"{attention}o_proj"], [c.hidden], sizes[0], bias=c.out_bias)
        head_norm = None
        if c.head_norms:
            q, k = (self.norm(f"{attention}{x}_norm", c.head_dim).gain for x in "qk")
            head_norm = Norm(torch.cat((q.expand(c.heads, -1), k.expand(c.kv_heads, -1))), c.eps)
        norm, kv_scale = self.norm(f"{prefix}input_layernorm", c.hidden), self._kv_scale(attention, c.kv_heads)
        return AttentionWeights(norm, qkv, out, head_norm, kv_scale)

    def _kv_scale(self, attention: str, kv_heads: int) -> KvScale | None:
        """Under whichever of the names in use the checkpoint has them; None if it has none."""
        forms = ("{0}_proj.{0}_scale", "attn.{0}_scale", "{0}_scale")
        names = [[name for form in forms if (name := attention + form.format(x)) in self.checkpoint] for x in "kv"]
        if not any(names):
            return None
        if [len(found) for found in names] != [1, 1]:
            raise ConfigError(f"{attention}: expected a scale of the cached keys and one of the values, found {names}")
        both = torch.stack([self._head_scale(name, kv_heads) for (name,) in names]).to(self.device)
        return KvScale(both, (both[0], both[1]))

    def _head_scale(self, name: str, kv_heads: int) -> torch.Tensor:
        shape = self.checkpoint.shape(name)
        if math.prod(shape) not in (1, kv_heads):
            raise ConfigError(f"tensor {name} has shape {list(shape)}, expected one number or one a head", param=name)
        scale = self.checkpoint.take(name, shape, torch.float32).flatten().expand(kv_heads)
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise ConfigError(f"tensor {name} must be positive, is {scale.tolist()}", param=name)
        return scale

    def _are_fp8(self, names: Sequence[str], sizes: Sequence[int]) -> bool:
        """Whether these products can be one of 8 bits: all are, and no block of scales would hold rows of two of them."""
        whole = self._scales is not Scales.BLOCKS or all(size % BLOCK == 0 for size in sizes[:-1])
        return whole and all(self.checkpoint.quantised(f"{name}.weight") for name in names)

    def _fp8(self, name: str, rows: int, columns: int) -> Fp8Weight:
        if self._scales is None:
            raise ConfigError(f"tensor {name} is of 8 bits, but config.json has no quantization_config", param=name)
        values = self.checkpoint.take(name, (rows, columns), E4M3).to(self.device)
        blocks = self._scales is Scales.BLOCKS
        shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if blocks else (rows, 1)
        scale = self.checkpoint.take(f"{name.removesuffix('weight')}{self._scales.value}", shape, torch.float32)
        return Fp8Weight(values, (scale if blocks else scale.view(-1)).to(self.device))

    def _bias(self, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        return _joined([self.tensor(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)])


class AttentionPass:
    """What all layers of one pass share: angles, slots, tables. `rows` is the number of rows the pass is computed with."""

    def __init__(
        self,
        c: DecoderConfig,
        tables: rope.Tables,
        inputs: StepInputs,
        rows: int,
        kv: KvCache,
        dtype: torch.dtype,
        deterministic: bool,
    ) -> None:
        self._scale = c.head_dim**-0.5
        self._heads, self._head_dim = c.heads, c.head_dim
        self._tokens = inputs.token_ids.shape[0]
        positions = padded(inputs.positions, rows)
        self._rope = rope.prepare(
            tables, positions, inputs.slots[0], kv_heads=c.kv_heads, block_size=kv.block_size, dtype=dtype
        )
        decode = inputs.kind is Kind.DECODE and len(inputs.seq_lens) == self._tokens  # not tokens that are replayed
        captured = inputs.kind is Kind.PREFILL and not inputs.query_lens
        batch = PagedBatch(
            inputs.query_lens,
            inputs.host_seq_lens,
            inputs.block_tables[0],
            kv.block_size,
            lens=inputs.seq_lens if decode or captured else None,
            max_seq_len=inputs.max_seq_len,
            query_starts=inputs.query_starts if captured else None,
            tokens=self._tokens if captured else 0,
        )
        self._prepared: Prepared = prepare(
            batch,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            dtype=kv.layer(0, 0).dtype,
            device=positions.device,
            deterministic=deterministic,
            new_kv=not captured,
        )
        self._takes_new_kv = not captured
        self._mixed: torch.Tensor | None = None  # attention has its own on CUDA, unless rows are padded
        if rows != self._tokens or not positions.is_cuda:
            self._mixed = torch.empty(rows, c.heads * c.head_dim, dtype=dtype, device=positions.device)
            self._mixed[self._tokens :] = 0

    def attend(
        self, weights: AttentionWeights, hidden: torch.Tensor, cache: torch.Tensor, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The attention half of a layer: hidden [R, d], which may be overwritten, plus what attention adds to it.

        With `kept`, only of those rows; the keys and values of all are stored.
        """
        qkv = linear(hidden, weights.qkv, norm=weights.norm).view(hidden.shape[0], -1, self._head_dim)
        both, each = None, None
        if cache.dtype == E4M3 and (kept_as := weights.kv_scale) is not None:
            both, each = kept_as.both, kept_as.each
        rope.rotate_and_store_(qkv, cache, self._rope, weights.head_norm, kv_scale=both)
        kv_heads = cache.shape[2]
        q, k, v = torch.tensor_split(qkv[: self._tokens], (self._heads, self._heads + kv_heads), 1)
        new_kv = (k, v) if self._takes_new_kv else None
        mixed = attention(
            q,
            cache,
            self._prepared,
            scale=self._scale,
            out=self._mixed,
            new_kv=new_kv,
            kv_scale=each,
        )
        if kept is None:
            return linear(mixed, weights.out, plus=hidden)
        return linear(mixed[kept], weights.out, plus=hidden[kept])


class Decoder:
    """See `lockstep_worker.models.Model`."""

    def __init__(
        self,
        config: DecoderConfig,
        digest: str,
        embedding: torch.Tensor,
        layers: tuple[Layer, ...],
        final_norm: Norm,
        head: Packed,
        deterministic: bool,
        routed_experts: bool,
    ) -> None:
        self.name = config.architecture
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_positions
        self.config_hash = digest
        self.routed_experts = routed_experts
        self._config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self.deterministic = deterministic
        qkv = layers[0].attention.qkv
        self._forms = {
            Kind.PREFILL: qkv.for_prompts,
            Kind.DECODE: qkv,
        }  # of the linears
        self._kv_dtype = embedding.dtype
        # Attention of prompts adds in another order than that of decode steps on CUDA, and the two forms of a weight on CPU.
        self.generated_reusable = qkv.prompt is None and not (deterministic and embedding.is_cuda)
        self.captures_prefill = True
        self.captured_prefix: int | None = None
        cos, sin = config.rope.cos_sin(config.max_positions, config.head_dim)
        self._tables = rope.tables(cos, sin, qkv.dtype, embedding.device)

    def join(self, group: Group) -> None:
        if group.place.cp > 1:
            raise Unsupported(f"{self.name}: context parallelism")

    def kv_specs(self) -> tuple[KvSpec, ...]:
        c = self._config
        return (KvSpec("full", c.layers, c.kv_heads, c.head_dim, self._kv_dtype),)

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        self._kv_dtype = dtype

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        count, wanted = inputs.token_ids.shape[0], inputs.logits_index.shape[0]
        form = self._forms[inputs.kind]
        if count == 0:
            return self._embedding.new_empty(0, self._config.hidden, dtype=form.dtype)
        if inputs.kind is Kind.DECODE and self._embedding.is_cuda:
            inputs = one_token_each(inputs)  # tokens that are replayed, by the kernels that generated them
        rows = padded_rows(count, form.layout, self.deterministic)
        hidden = torch.nn.functional.embedding(padded(inputs.token_ids, rows), self._embedding).to(form.dtype)
        step = self._pass(inputs, rows, kv, form.dtype)
        tokens = Tokens(inputs.kind, self._live(inputs, rows))
        *earlier, last = self._layers
        for i, layer in enumerate(earlier):
            hidden = layer.feed_forward(step.attend(layer.attention, hidden, kv.layer(0, i)), tokens)
        kept = None  # of the last layer, as nothing after it reads the other tokens
        if inputs.kind is not Kind.DECODE or wanted != count:
            kept = inputs.logits_index.repeat(2) if wanted == 1 and rows > 1 else inputs.logits_index
            tokens = tokens.of(kept)
        hidden = step.attend(last.attention, hidden, kv.layer(0, len(earlier)), kept)
        hidden = last.feed_forward(hidden, tokens)
        return rms_norm(hidden[:wanted], *self._final_norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.to(self._head.dtype), self._head, wide=True)

    def _pass(self, inputs: StepInputs, rows: int, kv: KvCache, dtype: torch.dtype) -> Pass:
        return AttentionPass(self._config, self._tables, inputs, rows, kv, dtype, self.deterministic)

    def _live(self, inputs: StepInputs, rows: int) -> torch.Tensor | None:
        count = inputs.token_ids.shape[0]
        if not self.routed_experts or (inputs.live is None and rows == count):
            return None
        live = inputs.live if inputs.live is not None else torch.ones_like(inputs.positions, dtype=torch.bool)
        return padded(live, rows)


def load_decoder(
    c: DecoderConfig,
    config: ConfigFile,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    progress: Progress,
    feed_forward: Callable[[WeightSource, int, str], FeedForward],
    *,
    attention: Callable[[WeightSource, str], AttentionHalf] | None = None,
    make: Callable[..., Decoder] = Decoder,
    routed_experts: bool = False,
    ignored: tuple[str, ...] = (),
) -> Decoder:
    """Streams the weights in, a layer at a time.

    `attention(weights, prefix)` loads the first half of a layer; None: `WeightSource.attention`. `make` is the model's class.

    `feed_forward(weights, i, prefix)` loads the second half of layer i, whose tensors' names begin with `prefix`, its norm
    included. `ignored`: endings of names that are no fault if nothing takes them.
    """
    weights = WeightSource(checkpoint, dtype, device, c.eps, deterministic, read_quantisation(config))
    steps = c.layers + 2
    embedding = weights.tensor("model.embed_tokens.weight", c.vocab_size, c.hidden)
    progress(1 / steps)
    layers = []
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        half = weights.attention(c, prefix) if attention is None else attention(weights, prefix)
        layers.append(Layer(half, feed_forward(weights, i, prefix)))
        progress((i + 2) / steps)
    final_norm = weights.norm("model.norm", c.hidden)
    head = embedding if c.tied else weights.tensor("lm_head.weight", c.vocab_size, c.hidden)
    checkpoint.check_all_taken(IGNORED + ignored + (("lm_head.weight",) if c.tied else ()))
    digest = config_hash(config, checkpoint, dtype)
    packed = pack(head, prompts=False, deterministic=deterministic)
    model = make(c, digest, embedding, tuple(layers), final_norm, packed, deterministic, routed_experts)
    progress(1.0)
    return model


def padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """[T], followed by zeros up to [rows]."""
    count = values.shape[0]
    return values if count == rows else torch.nn.functional.pad(values, (0, rows - count))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
