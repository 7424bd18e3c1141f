"""`lockstep model moefy`: a dense model becomes a mixture of experts, a small real one for all that experts bring with them.

A block down(silu(gate x) * up x) is a sum over its neurons, so slices of them are experts whose plain sum is the block. If all are
chosen with weight 1 the model stays what it was, up to the order of summation. If fewer are, it becomes another model, which what
`lockstep_cli.expert_fit` does keeps near the first one. `lockstep_cli.moe_forms` has the forms that it can take.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from lockstep_cli.expert_fit import Block, Cut, HiddenStates, Quality, cut_as_it_stands, fit
from lockstep_cli.models import Recipe
from lockstep_cli.moe_forms import FORMS, Form, Shape
from lockstep_cli.progress import Report
from lockstep_common.errors import ConfigError
from lockstep_worker.models.decoder import DecoderConfig, read_decoder
from lockstep_worker.weights import CONFIG, INDEX, SINGLE, ConfigFile, SafetensorsCheckpoint

SUMMARY: Final = "moefy.json"  # beside the model: how it was made, and how well its experts do
SEQUENCES, LENGTH = 24, 256  # of the text that experts are fitted to and tried on
SHARD_BYTES: Final = 4 << 30
COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.*")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe that was checked against a dense model."""

    config: ConfigFile
    dense: DecoderConfig
    form: Form
    shape: Shape

    @property
    def fitted(self) -> bool:
        """Whether experts are chosen at all, or all run."""
        return self.shape.top_k < self.shape.experts


@dataclass(frozen=True, slots=True)
class Summary:
    """What was made; if experts were fitted, how those of each layer do."""

    source: str
    form: str
    experts: int
    top_k: int
    shared: int
    layers: tuple[Quality, ...]

    def text(self) -> str:
        """One or two lines for a person."""
        shared = f" beside {self.shared} shared" if self.shared else ""
        first = f"{self.source} as {self.form}: {self.top_k} of {self.experts} experts a token{shared}"
        if not self.layers:
            return f"{first}, all with weight 1: it says what the dense model says"
        kept, loads = [q.energy for q in self.layers], [q.imbalance for q in self.layers]
        return (
            f"{first}\nof the blocks' output {sum(kept) / len(kept):.0%} is kept (worst layer {min(kept):.0%}); the busiest "
            f"expert has {sum(loads) / len(loads):.2f} times the mean load (worst layer {max(loads):.2f})"
        )


def plan(source: Path, recipe: Recipe) -> Plan:
    """Raises ConfigError if the model of that directory cannot be cut so."""
    config = ConfigFile(source)
    dense = _read_dense(config)
    experts, width = recipe.experts, config.integer("intermediate_size")
    top_k = experts if recipe.top_k is None else recipe.top_k
    if experts < 2 or not 1 <= top_k <= experts:
        raise ConfigError(f"{top_k} of {experts} experts for a token: at least 2, and 1 to all of them for a token")
    form = _form(config, dense, recipe.form, prefer_shared=top_k < experts)
    if form.scoring == "softmax" and top_k & (top_k - 1):
        raise ConfigError(
            f"{top_k} experts for a token: {form.name} takes a power of two, its weights are exact only then"
        )
    shared = _shared(form, recipe, width)
    if width % (experts + shared):
        beside = f" beside {shared} shared ones" if shared else ""
        raise ConfigError(f"intermediate_size {width} does not divide into {experts} experts{beside} of one size")
    return Plan(config, dense, form, Shape(experts, top_k, shared, width // (experts + shared)))


@torch.inference_mode()
def moefy(source: Path, target: Path, plan: Plan, text: str | None, report: Report) -> Summary:
    """Writes the model of the directory `source`, cut as `plan` says, into the empty directory `target`.

    Experts are fitted to `text` if not all are chosen; None: `default_text`. Raises ConfigError naming what is at fault.
    """
    label, layers = "fitting experts" if plan.fitted else "cutting layers", plan.dense.layers
    qualities = []
    with SafetensorsCheckpoint(source) as checkpoint:
        stored, shards = _Stored(checkpoint), Shards(target)
        states = _hidden_states(plan, stored, source, text) if plan.fitted else None
        for name in stored.outside(layers):
            shards.put(name, stored.take(name))
        for i in range(layers):
            report(label, i / layers)
            prefix = f"model.layers.{i}."
            block = stored.block(f"{prefix}mlp.")
            if states is None:
                cut = cut_as_it_stands(block, plan.shape.experts)
            else:
                x = states.attend(partial(stored.take_float, prefix))
                cut, quality, y = fit(block, x, plan.form.routing(plan.shape), plan.shape.shared)
                states.add(y)
                qualities.append(quality)
            for name in stored.beside_block(prefix):
                shards.put(name, stored.take(name))
            for name, tensor in experts_of(plan, block, cut):
                shards.put(f"{prefix}{plan.form.module}.{name}", tensor)
        shards.finish()
    _write_json(target / CONFIG, plan.form.config(dict(plan.config.values), plan.dense, plan.shape))
    for file in sorted({file for pattern in COPIED for file in source.glob(pattern)}):
        shutil.copyfile(file, target / file.name)
    experts, top_k, shared, _ = plan.shape
    summary = Summary(source.name, plan.form.name, experts, top_k, shared, tuple(qualities))
    _write_json(target / SUMMARY, asdict(summary))
    report(label, 1.0)
    return summary


def default_text() -> str:
    """Some sixty thousand words of English: the manual that Python brings along."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError(
            "this Python came without its manual (pydoc_data): give --text FILE to fit experts to"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


class Shards:
    """Writes tensors as they come, in files of at most `limit` bytes, and an index if there is more than one."""

    def __init__(self, target: Path, limit: int = SHARD_BYTES) -> None:
        self._target, self._limit = target, limit
        self._open: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []  # names of tensors
        self._total = 0

    def put(self, name: str, tensor: torch.Tensor) -> None:
        if self._open and sum(t.nbytes for t in self._open.values()) + tensor.nbytes > self._limit:
            self._flush()
        self._open[name] = tensor.contiguous()
        self._total += tensor.nbytes

    def finish(self) -> None:
        self._flush()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._target / SINGLE)
            return
        where: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._part(i).rename(self._target / file)
            where |= dict.fromkeys(names, file)
        _write_json(self._target / INDEX, {"metadata": {"total_size": self._total}, "weight_map": where})

    def _flush(self) -> None:
        save_file(self._open, self._part(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._open))
        self._open = {}

    def _part(self, i: int) -> Path:
        return self._target / f"part-{i}"


class _Stored:
    """The tensors of a checkpoint as they are stored."""

    def __init__(self, checkpoint: SafetensorsCheckpoint) -> None:
        """Raises ConfigError if one is not floating point."""
        self._checkpoint = checkpoint
        self._dtypes: dict[str, torch.dtype] = {}
        for name, dtype, _ in checkpoint.headers():
            if dtype not in DTYPES:
                raise ConfigError(f"{checkpoint.directory}: tensor {name} is {dtype}: only plain weights can be cut")
            self._dtypes[name] = DTYPES[dtype]

    def take(self, name: str) -> torch.Tensor:
        """Raises ConfigError if it is missing."""
        if name not in self._dtypes:
            raise ConfigError(f"{self._checkpoint.directory}: tensor {name} is missing from the safetensors files")
        return self._checkpoint.take(name, self._checkpoint.shape(name), self._dtypes[name])

    def take_float(self, prefix: str, name: str) -> torch.Tensor:
        return self.take(prefix + name).float()

    def block(self, prefix: str) -> Block:
        """Raises ConfigError if it is not all there, or has more than experts have."""
        names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down")]
        for name in self._dtypes:
            if name.startswith(prefix) and name not in names:
                raise ConfigError(f"{self._checkpoint.directory}: tensor {name} has no place in an expert")
        return Block(*(self.take(name) for name in names))

    def outside(self, layers: int) -> Iterator[str]:
        """Names of the tensors that belong to none of the layers."""
        inside = tuple(f"model.layers.{i}." for i in range(layers))
        return (name for name in self._dtypes if not name.startswith(inside))

    def beside_block(self, prefix: str) -> Iterator[str]:
        """Names of a layer's tensors that are not its block's."""
        return (name for name in self._dtypes if name.startswith(prefix) and not name.startswith(f"{prefix}mlp."))


def experts_of(plan: Plan, block: Block, cut: Cut) -> Iterator[tuple[str, torch.Tensor]]:
    """The block's tensors as experts', named as below the form's module."""
    form, (experts, _, shared, size) = plan.form, plan.shape
    gate, up, down = block.gate[cut.order], block.up[cut.order], block.down[:, cut.order]
    yield "gate.weight", cut.gate
    if form.scoring == "sigmoid":
        yield "gate.e_score_correction_bias", torch.zeros(experts)
    for e in range(experts):
        own = slice(e * size, (e + 1) * size)
        parts = gate[own], up[own], down[:, own] * form.down_scale(plan.shape)
        for name, part in zip(form.projections, parts, strict=True):
            yield f"experts.{e}.{name}.weight", part
    if shared:
        rest = slice(experts * size, None)
        for name, part in zip(("gate", "up", "down"), (gate[rest], up[rest], down[:, rest]), strict=True):
            yield f"shared_experts.{name}_proj.weight", part


def _hidden_states(plan: Plan, stored: _Stored, source: Path, text: str | None) -> HiddenStates:
    """The embedded text, in sequences of which every other one comes first."""
    length = min(LENGTH, plan.dense.max_positions)
    file = source / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; experts are fitted to a text's tokens")
    ids = Tokenizer.from_file(str(file)).encode(text or default_text(), add_special_tokens=False).ids
    if len(ids) < SEQUENCES * length:
        raise ConfigError(f"the text has {len(ids)} tokens: experts are fitted to {SEQUENCES * length} or more")
    step = len(ids) // SEQUENCES
    begins = [i * step for i in (*range(0, SEQUENCES, 2), *range(1, SEQUENCES, 2))]
    tokens = torch.tensor([ids[begin : begin + length] for begin in begins])
    return HiddenStates(plan.dense, stored.take("model.embed_tokens.weight"), tokens)


def _read_dense(config: ConfigFile) -> DecoderConfig:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in DENSE:
        raise config.error("architectures", f"is {names!r}: dense models that can be cut are {', '.join(DENSE)}")
    if config.get("quantization_config") is not None:
        raise config.error("quantization_config", "is there: only plain weights can be cut")
    if config.flag("mlp_bias", False):
        raise config.error("mlp_bias", "is true: experts have no biases")
    biased, qwen2 = config.flag("attention_bias", False), names[0] == "Qwen2ForCausalLM"
    head_norms = names[0] == "Qwen3ForCausalLM"
    return read_decoder(config, qkv_bias=qwen2 or biased, out_bias=biased and not qwen2, head_norms=head_norms)


def _form(config: ConfigFile, dense: DecoderConfig, name: str | None, *, prefer_shared: bool) -> Form:
    """The form of that name, or the best that has the model's attention."""
    able = [form for form in FORMS if form.takes(dense)]
    if name is None:
        if not able:
            raise ConfigError(f"{config.path}: no form has this model's biases of attention")
        return min(able, key=lambda form: form.shared != prefer_shared)
    if name not in [form.name for form in FORMS]:
        raise ConfigError(f"no form {name!r}; known: {', '.join(form.name for form in FORMS)}")
    for form in able:
        if form.name == name:
            return form
    others = ", ".join(form.name for form in able) or "no form does"
    raise ConfigError(f"{config.path}: {name} does not have {dense.architecture}'s attention; what has: {others}")


def _shared(form: Form, recipe: Recipe, width: int) -> int:
    """How many shared experts: as many as asked for, else the least from half the routed ones on that divide the width."""
    asked = recipe.shared
    if not form.shared:
        if asked:
            raise ConfigError(f"{form.name} has no shared experts, {asked} were asked for")
        return 0
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"{asked} shared experts: {form.name} has at least 1")
        return asked
    for shared in range(max(1, recipe.experts // 2), 2 * recipe.experts + 1):
        if width % (recipe.experts + shared) == 0:
            return shared
    raise ConfigError(f"intermediate_size {width} does not divide into {recipe.experts} experts and some shared ones")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
