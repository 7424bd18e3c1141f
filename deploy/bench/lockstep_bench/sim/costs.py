"""What a step costs: a model's shape, a machine's rates, a group's layout. Pure arithmetic.

All ranks take a step together, so the step is as long as the slowest rank's part. With

    local(r)  = max(dense bytes / bandwidth, dense FLOPs / rate)           projections, dense MLPs, shared experts, head
              + max(KV bytes / bandwidth, attention FLOPs / rate)
              + activation bytes / bandwidth                               what lies between the products
              + rows x row time
    experts   = max(bytes of the experts that are hit / bandwidth, FLOPs / rate), of the heaviest rank (x imbalance)
    exchange  = tokens x copies x bytes / link + latencies, of the rank that sends or receives most
    cp        = keys gathered in prefill, partial results in decode

    compute   = max over r of local(r) + experts
    step      = base + compute + exchange + cp - overlap x min(compute, exchange + cp)

Laws, which are tested: no term is negative; nothing gets shorter with more tokens, rows or context, or with slower rates; one
rank's work counts if it is the slowest and not otherwise; a rank without work pays as much as the others; overlap 1 leaves the
larger of compute and exchange, overlap 0 their sum. Decode runs captured steps: every rank computes the header's row bucket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep_bench import shapes as stored
from lockstep_bench.sim.shape import Shape, Widths, shape
from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind

Floats = npt.NDArray[np.float64]

_MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one GPU and what it is connected with: per second, and in seconds."""

    flops: float
    expert_flops: float
    prefill_attention_flops: float
    decode_attention_flops: float
    weight_bandwidth: float
    expert_bandwidth: float
    kv_bandwidth: float
    activation_bandwidth: float
    link_bandwidth: float = 50e9  # of dispatch and combine, one direction: 400 Gb/s a GPU
    link_latency: float = 20e-6  # of one of them
    cp_bandwidth: float = 50e9
    cp_latency: float = 20e-6
    step: float = 0.0  # a decode step, beyond everything below
    prefill_step: float = 0.0  # the same of a prefill pass
    layer: float = 0.0  # a layer's launches, where nothing hides them
    moe_layer: float = 0.0  # what routed experts add to that
    row: float = 0.0  # sampling and bookkeeping of a row
    plan: float = 0.0  # between two plans


def instant() -> Rates:
    """Rates at which nothing takes time."""
    endless = {f.name: 1e30 for f in fields(Rates) if f.name.endswith(("flops", "bandwidth"))}
    return Rates(**endless, link_latency=0.0, cp_latency=0.0)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a group is laid out. `copies`: how often a token crosses the link on its way to its experts; 0: once for each other
    rank that has one of them, with experts chosen at random."""

    dp: int = 1
    cp: int = 1
    slots: int = 0  # experts of a layer with their replicas, over all ranks; 0: as many as experts
    copies: float = 0.0
    imbalance: float = 1.0  # heaviest rank's expert load over the mean
    overlap: float = 0.0  # share of the shorter one of compute and exchange that hides under the other
    micro_batches: int = 1
    prompts_elsewhere: bool = False  # another unit prefills: a prompt's KV arrives, and only its last token is computed

    @property
    def ranks(self) -> int:
        return self.dp * self.cp


@dataclass(frozen=True, slots=True)
class Work:
    """One step's work, an element a DP rank."""

    kind: Kind
    tokens: Floats  # computed
    rows: Floats  # sampled
    pairs: Floats  # (query, key)
    context: Floats  # tokens whose KV is read from the cache
    bucket: int = 0  # rows that a captured step computes on every rank; 0: not captured

    @classmethod
    def decode(cls, lengths_sum: npt.ArrayLike, rows: npt.ArrayLike, bucket: int = 0) -> Work:
        """A step of `rows[r]` rows whose contexts add up to `lengths_sum[r]` tokens."""
        context, count = np.asarray(lengths_sum, float), np.asarray(rows, float)
        return cls(Kind.DECODE, count, count, context, context, bucket)

    @classmethod
    def prefill(cls, starts: list[npt.ArrayLike], counts: list[npt.ArrayLike], rows: npt.ArrayLike) -> Work:
        """A pass over the chunks [starts[r][i], starts[r][i] + counts[r][i]) of each rank r, after which rows[r] rows are
        sampled."""
        before = [np.asarray(s, float) for s in starts]
        count = [np.asarray(c, float) for c in counts]
        return cls(
            Kind.PREFILL,
            tokens=np.array([c.sum() for c in count]),
            rows=np.asarray(rows, float),
            pairs=np.array([(c * s + c * (c + 1) / 2).sum() for s, c in zip(before, count, strict=True)]),
            context=np.array([s.sum() for s in before]),
        )


TERMS = ("base", "dense", "attention", "activations", "rows", "skew", "experts", "exchange", "cp", "hidden")
"""`skew` is what the mean rank waits for the slowest one; the terms before it are means over ranks. `hidden` is negative."""


@dataclass(frozen=True, slots=True)
class StepCost:
    seconds: float
    terms: dict[str, float]  # by TERMS; they add up to `seconds`


@dataclass(frozen=True, slots=True)
class CostModel:
    shape: Shape
    rates: Rates
    layout: Layout = field(default_factory=Layout)

    def step(self, work: Work) -> StepCost:
        """Seconds of one step, and where they go."""
        shape, rates, layout = self.shape, self.rates, self.layout
        if layout.prompts_elsewhere and work.kind is Kind.PREFILL:
            return StepCost(rates.prefill_step, dict.fromkeys(TERMS, 0.0) | {"base": rates.prefill_step})
        halves = layout.micro_batches
        local = self._local(work)
        parts = np.stack(list(local.values()))
        slowest = float(parts.sum(axis=0).max())
        terms = {name: float(part.mean()) for name, part in local.items()}
        terms["skew"] = slowest - sum(terms.values())
        terms["base"] = rates.prefill_step if work.kind is Kind.PREFILL else rates.step
        terms["base"] += halves * (shape.layers * rates.layer + shape.moe_layers * rates.moe_layer)
        terms["experts"] = self._experts(work)
        terms["exchange"] = self._exchange(work)
        terms["cp"] = self._cp(work)
        compute, exchange = slowest + terms["experts"], terms["exchange"] + terms["cp"]
        terms["hidden"] = -layout.overlap * min(compute, exchange)
        terms = {name: terms[name] for name in TERMS}
        return StepCost(sum(terms.values()), terms)

    def _local(self, work: Work) -> dict[str, Floats]:
        shape, rates, layout = self.shape, self.rates, self.layout
        prefill = work.kind is Kind.PREFILL
        tokens = np.maximum(work.tokens, work.bucket) / layout.cp
        rows = np.maximum(work.rows, work.bucket)
        flops = tokens * shape.dense_flops + rows * shape.head_flops / layout.cp
        read = layout.micro_batches * (shape.dense_bytes + shape.head_bytes / layout.cp)
        pair = shape.prefill_pair_flops if prefill else shape.decode_pair_flops
        rate = rates.prefill_attention_flops if prefill else rates.decode_attention_flops
        expanded = work.context * shape.expand_flops / rates.flops if prefill else 0.0
        attention = np.maximum(work.context * shape.kv_bytes / rates.kv_bandwidth, work.pairs * pair / rate) + expanded
        carried = tokens * shape.activation_bytes
        carried += tokens * shape.moe_layers * shape.chosen * shape.expert_activation_bytes
        return {
            "dense": np.maximum(read / rates.weight_bandwidth, flops / rates.flops),
            "attention": attention / layout.cp,
            "activations": carried / rates.activation_bandwidth,
            "rows": work.rows * rates.row,
        }

    def _experts(self, work: Work) -> float:
        """Of all layers, on the heaviest rank."""
        shape, rates, layout = self.shape, self.rates, self.layout
        tokens = float(work.tokens.sum())
        if not shape.experts or not tokens:
            return 0.0
        halves = layout.micro_batches
        untouched = math.pow(1 - shape.chosen / shape.experts, tokens / halves)
        hit = (layout.slots or shape.experts) / layout.ranks * (1 - untouched)
        heaviest = layout.imbalance * tokens * shape.chosen / layout.ranks
        read = halves * hit * shape.expert_bytes / rates.expert_bandwidth
        return shape.moe_layers * max(read, heaviest * shape.expert_flops / rates.expert_flops)

    def _exchange(self, work: Work) -> float:
        shape, rates, layout = self.shape, self.rates, self.layout
        if not shape.experts or layout.ranks == 1:
            return 0.0
        sent = float(work.tokens.max()) / layout.cp
        received = layout.imbalance * float(work.tokens.sum()) / layout.ranks
        copies = layout.copies or other_ranks(shape.experts, shape.chosen, layout.ranks)
        carried = max(sent, received) * copies * (shape.dispatch_bytes + shape.combine_bytes)
        return shape.moe_layers * (carried / rates.link_bandwidth + 2 * layout.micro_batches * rates.link_latency)

    def _cp(self, work: Work) -> float:
        """Prefill gathers the chunk's and the prefix's keys and values from the other ranks; decode merges partial results."""
        shape, rates, layout = self.shape, self.rates, self.layout
        if layout.cp == 1:
            return 0.0
        share = (layout.cp - 1) / layout.cp
        if work.kind is Kind.PREFILL:
            carried = float((work.tokens + work.context).max()) * shape.kv_bytes * share
        else:
            carried = float(np.maximum(work.rows, work.bucket).max()) * shape.layers * shape.combine_bytes * share
        return carried / rates.cp_bandwidth + shape.layers * rates.cp_latency


def other_ranks(experts: int, chosen: int, ranks: int) -> float:
    """How many ranks other than its own a token is sent to, if each rank has experts / ranks of the experts and every choice
    of `chosen` ones is as probable: (ranks - 1) (1 - C(E - E/R, k) / C(E, k))."""
    own = experts / ranks
    missed = math.prod(max(0.0, (experts - own - i) / (experts - i)) for i in range(chosen))
    return (ranks - 1) * (1 - missed)


@dataclass(frozen=True, slots=True)
class Machine:
    """A file of `models/`: rates and where they come from, and if it is about one deployment its model, layout and engine."""

    name: str
    about: str
    sources: tuple[str, ...]
    rates: Rates
    widths: Widths
    layout: Layout
    model: Mapping[str, Any] | str  # a config, or the name of a shape; "" if any will do
    engine: Mapping[str, Any]
    load: Mapping[str, Any]
    fit: Mapping[str, Any]

    def cost_model(self, model: str = "", **layout: Any) -> CostModel:
        """For a model of its own if the file names none, or another one; `layout` replaces fields of the layout."""
        chosen = model or self.model
        if not chosen:
            raise ConfigError(
                f"{self.name} is about no model in particular: give --model ({', '.join(stored.names())})"
            )
        config = stored.config(chosen) if isinstance(chosen, str) else chosen
        return CostModel(shape(config, self.widths), self.rates, replace(self.layout, **layout))


def names() -> list[str]:
    """The files that come with the package."""
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def load(name: str) -> Machine:
    """By a name of `names()` or a path; ConfigError says what is wrong with it."""
    path = _MODELS / f"{name}.json"
    if not path.is_file():
        path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"{name} is neither a file nor one of {', '.join(names())}")
    try:
        data = json.loads(path.read_text())
        return Machine(
            name=data["name"],
            about=data["about"],
            sources=tuple(data.get("sources", ())),
            rates=Rates(**data["rates"]),
            widths=Widths(**data.get("widths", {})),
            layout=Layout(**data.get("layout", {})),
            model=data.get("model", ""),
            engine=data.get("engine", {}),
            load=data.get("load", {}),
            fit=data.get("fit", {}),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a cost model: {error}") from None


def rates_dict(rates: Rates) -> dict[str, float]:
    """With three significant digits more than anybody could claim."""
    return {f.name: float(f"{asdict(rates)[f.name]:.6g}") for f in fields(rates)}
