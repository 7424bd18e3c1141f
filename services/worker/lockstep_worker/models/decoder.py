"""A decoder of pre-norm layers with grouped-query attention. A family adds the second half of its layers: its feed-forward part.

hidden += out(attention(rope(qkv(norm(hidden)))))      AttentionBlock
hidden += feed_forward(norm(hidden))                   FeedForward, the family's
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from lockstep_common.errors import ConfigError, Conflict, Unsupported
from lockstep_common.steps import Kind
from lockstep_kernels import rope
from lockstep_kernels.fp8 import BLOCK, E4M3, Fp8Weight, dequantise
from lockstep_kernels.linear import Packed, linear, pack, pack_fp8, split
from lockstep_kernels.rms_norm import Norm, rms_norm
from lockstep_kernels.swiglu import GateUp, pack_gate_up, pack_gate_up_fp8, swiglu
from lockstep_worker.collectives import Alone, Communicator, Group
from lockstep_worker.context import Division, Mirrored, Undivided, divide
from lockstep_worker.exchange.layer import ShardedExperts, ShardedLayers
from lockstep_worker.exchange.placement import spread_of
from lockstep_worker.inputs import StepInputs, one_token_each
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models.attention import (
    AttentionPass,
    AttentionWeights,
    KvScale,
    MirroredAttentionPass,
    padded,
)
from lockstep_worker.models.layers import Rope, check_full_attention, config_hash, padded_rows, read_rope
from lockstep_worker.overlap import Stages, halve, last_of, take_turns
from lockstep_worker.quantisation import Scales, read_quantisation
from lockstep_worker.weights import Checkpoint, ConfigFile, Loading

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
class Tokens:
    """What a feed-forward part may ask about the R rows of hidden states it is given."""

    kind: Kind
    live: torch.Tensor | None  # [R] bool: rows of living sequences, the others are routed to no expert; None: all
    spread: torch.Tensor | None = None  # [R] int64 that chooses among an expert's replicas; None: there are none
    capacity: int = 0  # the most rows that any rank brings to its experts, as all know; 0: nobody knows

    def of(self, kept: torch.Tensor, mine: torch.Tensor | None = None) -> Tokens:
        """Of the rows `kept` only, of which those that are not `mine` (bool; None: all are) are not alive here."""
        live, spread = (None if x is None else x[kept] for x in (self.live, self.spread))
        if mine is not None:
            live = mine if live is None else live & mine
        return replace(self, live=live, spread=spread)


class FeedForward(Protocol):
    """The second half of a layer: norm, feed-forward part, residual. `routed`: tokens go to experts."""

    @property
    def routed(self) -> bool: ...

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """[R, d] of hidden [R, d], which may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """The dense feed-forward part: down(silu(gate(x)) * up(x))."""

    norm: Norm
    gate_up: GateUp
    down: Packed
    routed: ClassVar[bool] = False

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return linear(swiglu(hidden, self.gate_up, norm=self.norm), self.down, plus=hidden)


class AttentionHalf(Protocol):
    """What a layer's attention half needs of its weights; a family may have another half than `AttentionWeights`."""

    @property
    def qkv(self) -> Packed:
        """The product that hidden states meet first; all linears of a model take operands of the same dtypes."""

    def shared(self, ranks: int) -> AttentionHalf:
        """The same weights for so many ranks that share sequences."""


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
        how: Loading,
        eps: float,
        scales: Scales | None,
    ) -> None:
        self.checkpoint = checkpoint
        self.deterministic = how.deterministic
        self.dtype = how.dtype
        self.device = how.device
        self.sharding = how.sharding
        self.sharded: list[ShardedExperts] = []  # layers whose experts are shared out among workers, as they are loaded
        self._eps = eps
        self._scales = scales

    def over(self, checkpoint: Checkpoint) -> WeightSource:
        """The same of another checkpoint."""
        other = copy.copy(self)
        other.checkpoint = checkpoint
        return other

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """In the model's dtype unless another is asked for."""
        if self.checkpoint.quantised(name):
            return dequantise(self._fp8(name, *shape), dtype or self.dtype)
        return self.checkpoint.take(name, shape, dtype or self.dtype).to(self.device)

    def weight(self, name: str, rows: int, columns: int) -> torch.Tensor | Fp8Weight:
        """As products take it: of 8 bits if it is stored so."""
        quantised = self.checkpoint.quantised(name)
        return self._fp8(name, rows, columns) if quantised else self.tensor(name, rows, columns)

    def part(self, name: str, *shape: int, part: int) -> torch.Tensor:
        """What stands under `part` in the first dimension of a tensor, in the model's dtype."""
        return self.checkpoint.take_part(name, shape, self.dtype, part)[0].to(self.device)

    def leave(self, name: str) -> None:
        """Another worker takes this tensor, and its scales if it is of 8 bits."""
        self.checkpoint.leave(name)
        if self._scales is not None and self.checkpoint.quantised(name):
            self.checkpoint.leave(f"{name.removesuffix('weight')}{self._scales.value}")

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
        experts: ShardedLayers | None = None,
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
        self.experts = experts
        self.deterministic = self._alone_deterministic = deterministic
        self._cp: Communicator = Alone()
        self._head_part = head  # the rows that this rank computes
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
        cp = group.cp
        if cp.size > 1 and self._kv_dtype == E4M3:
            raise Unsupported(f"a KV cache of {self._kv_dtype} that {cp.size} ranks share: give --kv-cache-dtype auto")
        if self.experts is not None:
            self.experts.join(group)
        elif self.routed_experts and group.place.dp > 1:
            place = group.place
            raise Conflict(
                f"this worker holds all routed experts, a group of {place.size} shares them out: start it with "
                f"--dp {place.dp} --cp {place.cp} --rank {place.rank}"
            )
        self._cp = cp
        self.deterministic = self._alone_deterministic and cp.size == 1  # parts are added by rank and by chunk
        self._layers = tuple(replace(layer, attention=layer.attention.shared(cp.size)) for layer in self._layers)
        self._head_part = self._head
        if cp.size > 1:
            sizes = [max(0, min(self._part, self.vocab_size - rank * self._part)) for rank in range(cp.size)]
            self._head_part = split(self._head, sizes)[cp.rank]

    def kv_specs(self) -> tuple[KvSpec, ...]:
        c = self._config
        return (KvSpec("full", c.layers, c.kv_heads, c.head_dim, self._kv_dtype),)

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        self._kv_dtype = dtype

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        if not inputs.dual_batch:
            return last_of(self._hidden(inputs, kv))
        halves = halve(inputs)
        return halves.merged(*take_turns([self._hidden(half, kv) for half in (halves.first, halves.second)]))

    def _hidden(self, inputs: StepInputs, kv: KvCache) -> Stages[torch.Tensor]:
        form = self._forms[inputs.kind]
        if len(inputs.token_ids) == 0:
            return (yield from self._accompany(inputs, form.dtype))
        division = self._divide(inputs, kv)
        rows = padded_rows(len(division.token_ids), form.layout, self.deterministic)
        hidden = torch.nn.functional.embedding(padded(division.token_ids, rows), self._embedding).to(form.dtype)
        step = self._pass(division, rows, kv, form.dtype)
        tokens = self._tokens(inputs, division, rows)
        *earlier, last = self._layers
        for i, layer in enumerate(earlier):
            hidden = step.attend(layer.attention, hidden, kv.layer(0, i))
            hidden = yield from division.feed_forward(layer.feed_forward, hidden, tokens)
        kept = division.kept(rows)  # of the last layer, as nothing after it reads the other tokens
        if kept is not None:
            tokens = tokens.of(kept.index, kept.mine)
        hidden = step.attend(last.attention, hidden, kv.layer(0, len(earlier)), None if kept is None else kept.index)
        hidden = yield from division.feed_forward(last.feed_forward, hidden, tokens)
        return rms_norm(division.wanted(hidden), *self._final_norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden.to(self._head.dtype), self._head_part, wide=True)
        if self._cp.size == 1:
            return logits
        if len(hidden) == 0:
            return logits.new_empty(0, self.vocab_size)
        part = torch.nn.functional.pad(logits, (0, self._part - logits.shape[1]))
        return self._cp.all_gather("logits", part).transpose(0, 1).flatten(1)[:, : self.vocab_size].contiguous()

    @property
    def _part(self) -> int:
        """Of the vocabulary, for each rank that shares the head; the last one may have less."""
        return -(-self.vocab_size // self._cp.size)

    def _divide(self, inputs: StepInputs, kv: KvCache) -> Division:
        if self._cp.size > 1:
            return divide(self._cp, inputs, kv)
        if inputs.kind is Kind.DECODE and self._embedding.is_cuda:
            inputs = one_token_each(inputs)  # tokens that are replayed, by the kernels that generated them
        return Undivided(inputs, routed_once=self.experts is not None)

    def _pass(self, division: Division, rows: int, kv: KvCache, dtype: torch.dtype) -> Pass:
        if isinstance(division, Mirrored):
            return MirroredAttentionPass(self._config, self._tables, division, rows, kv, dtype, self.deterministic)
        return AttentionPass(self._config, self._tables, division, rows, kv, dtype, self.deterministic)

    def _accompany(self, inputs: StepInputs, dtype: torch.dtype) -> Stages[torch.Tensor]:
        """A pass without a token: what the other ranks need of this one's experts. Returns no hidden state."""
        hidden = self._embedding.new_empty(0, self._config.hidden, dtype=dtype)
        if self.experts is not None:
            yield from self.experts.accompany(hidden, Tokens(inputs.kind, None, None, self._most(inputs)))
        return hidden

    def _tokens(self, inputs: StepInputs, division: Division, rows: int) -> Tokens:
        spread = None
        if self.experts is not None and self.experts.replicated:
            spread = padded(spread_of(division.positions, division.token_ids), rows)
        return Tokens(inputs.kind, self._live(division, rows), spread, self._most(inputs))

    def _most(self, inputs: StepInputs) -> int:
        """Rows that any rank brings to its experts at most, if that is known; see `lockstep_worker.context` for who brings which."""
        shared = self._cp.size > 1
        if self.experts is None or not inputs.expert_rows or (shared and inputs.kind is Kind.PREFILL):
            return 0
        rows = padded_rows(inputs.expert_rows, self._forms[inputs.kind].layout, self.deterministic)
        return -(-rows // self._cp.size)

    def _live(self, division: Division, rows: int) -> torch.Tensor | None:
        count = len(division.token_ids)
        if not self.routed_experts or (division.live is None and rows == count):
            return None
        live = division.live if division.live is not None else torch.ones_like(division.positions, dtype=torch.bool)
        return padded(live, rows)


def load_decoder(
    c: DecoderConfig,
    config: ConfigFile,
    checkpoint: Checkpoint,
    how: Loading,
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
    weights = WeightSource(checkpoint, how, c.eps, read_quantisation(config))
    steps = c.layers + 2
    embedding = weights.tensor("model.embed_tokens.weight", c.vocab_size, c.hidden)
    how.progress(1 / steps)
    layers = []
    for i in range(c.layers):
        prefix = f"model.layers.{i}."
        half = weights.attention(c, prefix) if attention is None else attention(weights, prefix)
        layers.append(Layer(half, feed_forward(weights, i, prefix)))
        how.progress((i + 2) / steps)
    final_norm = weights.norm("model.norm", c.hidden)
    head = embedding if c.tied else weights.tensor("lm_head.weight", c.vocab_size, c.hidden)
    checkpoint.check_all_taken(IGNORED + ignored + (("lm_head.weight",) if c.tied else ()))
    digest, experts = config_hash(config, checkpoint, how.dtype), None
    if weights.sharded:
        experts = ShardedLayers(weights.sharded, how.sharding, how.reopen)
        digest += f", {how.sharding.agreed}"
    packed = pack(head, prompts=False, deterministic=how.deterministic)
    model = make(c, digest, embedding, tuple(layers), final_norm, packed, how.deterministic, routed_experts, experts)
    how.progress(1.0)
    return model


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
