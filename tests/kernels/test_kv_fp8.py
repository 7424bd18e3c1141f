"""A KV cache of 8 bits within a whole model: where its scales come from, and what it costs in the logits.

e4m3 keeps 4 bits, so what is cached errs by up to 2^-4 of itself, evenly, some 2^-5.5 in the mean square. Keys err in the scores,
values in what is mixed, and each only in the part of the residual stream that attention adds: logits that spread by 1 may
be off by 2^-4 in the mean square, and the largest of thousands by some six times that.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lockstep_common.errors import ConfigError
from lockstep_common.steps import Kind
from tests.kernels.device import DEVICE, requires_gpu

from lockstep_kernels import rope  # isort: skip
from lockstep_kernels.attention import PagedBatch, reference  # isort: skip
from lockstep_kernels.fp8 import E4M3  # isort: skip
from lockstep_worker.models import Model, load_model  # isort: skip
from lockstep_worker.models import attention as half  # isort: skip
from lockstep_worker.weights import SINGLE  # isort: skip
from tests.kernels.sequences import EVERY, Sequences  # isort: skip
from tests.kernels.oracles import VOCAB, build  # isort: skip
from tests.kernels.test_oracles import BASE  # isort: skip
from tests.kernels.test_oracles_deepseek import V2_LITE  # isort: skip

RMS, LARGEST = 2**-4, 2**-1.5
LENGTHS = (61, 37)
CPU = torch.device("cpu")
LARGE: dict[str, Any] = BASE | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def make(path: Path, fields: dict[str, Any]) -> Path:
    build("Qwen3", fields, path)
    return path


def with_scales(path: Path, scales: dict[str, torch.Tensor]) -> None:
    """Adds tensors to every layer's attention."""
    tensors = load_file(str(path / SINGLE))
    for layer in range(BASE["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.self_attn.{name}": scale.clone() for name, scale in scales.items()}
    save_file(tensors, str(path / SINGLE))


def load(path: Path, kv_dtype: torch.dtype | None = None, **options: Any) -> Model:
    given: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "deterministic": True} | options
    return load_model(path, kv_dtype=kv_dtype, **given)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = got.cpu() - want
    assert bool(error.isfinite().all())
    assert error.square().mean().sqrt() < RMS * want.std(), error.square().mean().sqrt() / want.std()
    assert error.abs().max() < LARGEST * want.std()


@pytest.fixture
def referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of 8 bits on CPU too, by the definitions of the ops."""

    def rotate_and_store(
        qkv: torch.Tensor, cache: torch.Tensor, prepared: rope.Prepared, norm: Any, *, kv_scale: torch.Tensor | None
    ) -> None:
        if cache.dtype != E4M3:
            rotate_and_store_(qkv, cache, prepared, norm)
            return
        wide = torch.zeros(cache.shape, dtype=qkv.dtype)
        rotate_and_store_(qkv, wide, prepared, norm)
        if kv_scale is not None:
            wide /= kv_scale[:, :, None, None]
        written = prepared.where
        kept = cache.view(torch.uint8).view(-1, cache.shape[-1])
        kept[written] = wide.view(-1, cache.shape[-1])[written].clamp(-448, 448).to(E4M3).view(torch.uint8)

    def attention(q: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, *, scale: float, out: torch.Tensor, new_kv: Any, kv_scale: Any) -> torch.Tensor:  # fmt: skip
        reference.attention(q, cache.float(), batch, scale, out, kv_scale)
        return out

    rotate_and_store_ = rope.rotate_and_store_
    monkeypatch.setattr(rope, "rotate_and_store_", rotate_and_store)
    monkeypatch.setattr(half, "attention", attention)
    monkeypatch.setattr(half, "prepare", lambda batch, **_: batch)


@pytest.mark.usefixtures("referenced")
@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("form", ["{}_proj.{}_scale", "attn.{1}_scale", "{1}_scale"])
def test_logits_with_the_scales_of_a_checkpoint(form: str, size: int, tmp_path: Path) -> None:
    """size: elements of the scale tensors; 0: one without a dimension."""
    path = make(tmp_path, BASE | {"head_dim": 16})
    scale = torch.full((size,) if size else (), 0.01)
    with_scales(path, {form.format(x, x): scale * (1 + i) for i, x in enumerate("kv")})
    model = load(path, E4M3)
    assert [spec.dtype for spec in model.kv_specs()] == [E4M3]
    compare(model, path)


@pytest.mark.usefixtures("referenced")
def test_logits_without_scales(tmp_path: Path) -> None:
    path = make(tmp_path, BASE | {"head_dim": 16})
    compare(load(path, E4M3), path)


def compare(model: Model, path: Path) -> None:
    """Chunks and steps against the same model with a cache of float32."""
    wide = Sequences(load(path), prompts(LENGTHS))
    narrow = Sequences(model, prompts(LENGTHS))
    differs = False
    for start, end in itertools.pairwise((0, 16, 30)):
        chunks = [(i, start, end) for i in range(len(LENGTHS))]
        rows = [s.run(Kind.PREFILL, chunks, wanted=EVERY) for s in (narrow, wide)]
        check(*rows)
        differs |= not torch.equal(*rows)
    for position in range(30, 35):
        chunks = [(i, position, position + 1) for i in range(len(LENGTHS))]
        check(*(s.run(Kind.DECODE, chunks) for s in (narrow, wide)))
    assert differs, "the cache is not of 8 bits"


@pytest.mark.usefixtures("referenced")
def test_a_scale_out_of_range_shows(tmp_path: Path) -> None:
    """Scales are used: values that are all beyond the largest number lose what they say."""
    path = make(tmp_path, BASE | {"head_dim": 16})
    with_scales(path, {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1e-6)})
    with pytest.raises(AssertionError):
        compare(load(path, E4M3), path)


def test_scales_do_nothing_to_a_cache_of_the_weights_dtype(tmp_path: Path) -> None:
    plain = Sequences(load(make(tmp_path / "a", BASE)), prompts(LENGTHS))
    with_scales(make(tmp_path / "b", BASE), {"k_scale": torch.tensor(0.3), "v_scale": torch.tensor(0.2)})
    scaled = Sequences(load(tmp_path / "b"), prompts(LENGTHS))
    chunks = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    assert torch.equal(*(s.run(Kind.PREFILL, chunks, wanted=EVERY) for s in (plain, scaled)))


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.tensor(1.0)}, "expected a scale of the cached keys and one of the values"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, r"has shape \[3\], expected one number or one a head"),
        ({"k_scale": torch.tensor(0.0), "v_scale": torch.tensor(1.0)}, "must be positive"),
    ],
)
def test_odd_scales_are_refused_by_name(scales: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with_scales(make(tmp_path, BASE), scales)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


@requires_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_the_gpu(dtype: torch.dtype, deterministic: bool, tmp_path: Path) -> None:
    """Whole prompts, chunks and steps of a larger model against itself on CPU with a cache of float32."""
    lengths = (200, 65, 130)
    path = make(tmp_path, LARGE)
    want = [Sequences(load(path), [t]).run(Kind.PREFILL, [(0, 0, len(t))], wanted=EVERY) for t in prompts(lengths)]
    model = load(path, E4M3, dtype=dtype, device=DEVICE, deterministic=deterministic)
    whole = Sequences(model, prompts(lengths), block_size=64, device=DEVICE)
    check(whole.run(Kind.PREFILL, [(i, 0, n) for i, n in enumerate(lengths)], wanted=EVERY), torch.cat(want))
    sequences = Sequences(model, prompts(lengths), block_size=64, device=DEVICE)
    for start, end in itertools.pairwise((0, 13, 40, 50)):
        got = sequences.run(Kind.PREFILL, [(i, start, end) for i in range(3)], wanted=EVERY)
        check(got, torch.cat([rows[start:end] for rows in want]))
    for position in range(50, max(lengths)):
        live = [i for i, n in enumerate(lengths) if position < n]
        got = sequences.run(Kind.DECODE, [(i, position, position + 1) for i in live])
        check(got, torch.stack([want[i][position] for i in live]))


def test_latents_are_refused(tmp_path: Path) -> None:
    transformers.DeepseekV2Config(**V2_LITE, architectures=["DeepseekV2ForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"latents cannot be kept as torch\.float8_e4m3fn: give --kv-cache-dtype auto"
    ):
        load(tmp_path, E4M3, dummy_weights=True)
