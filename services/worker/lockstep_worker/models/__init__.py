"""The models a worker can run, found by the `architectures` field of config.json."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

import torch

from lockstep_worker.collectives import Group
from lockstep_worker.exchange.layer import ShardedLayers
from lockstep_worker.exchange.placement import WHOLE, Sharding
from lockstep_worker.inputs import StepInputs
from lockstep_worker.kv import KvCache, KvSpec
from lockstep_worker.models import deepseek, glm4_moe, llama, mixtral, qwen3_moe
from lockstep_worker.quantisation import read_quantisation
from lockstep_worker.weights import Checkpoint, ConfigFile, DummyCheckpoint, Loading, Progress, SafetensorsCheckpoint

__all__ = ["ARCHITECTURES", "Model", "load_model"]


class Model(Protocol):
    """One model on one device. Rows, blocks and sampling are not its business."""

    name: str  # its architecture
    vocab_size: int
    max_model_len: int
    routed_experts: bool
    deterministic: bool  # as asked for when it was loaded, and kept
    generated_reusable: (
        bool  # a prompt pass (PREFILL) over generated tokens gives the same bits of KV as generating them (DECODE)
    )
    captures_prefill: bool  # `forward` takes prefill passes whose lengths only the device knows, as a CUDA graph needs
    captured_prefix: (
        int | None
    )  # all sequences of such a pass have at most so many positions before it; None: any number
    experts: ShardedLayers | None  # the layers whose routed experts are shared out among workers
    config_hash: str  # equal on two workers exactly if config, dtype and the weights' headers are

    def join(self, group: Group) -> None:
        """Computes together with the workers of this group from now on; a group of one is nobody else.

        Conflict if it was loaded for another place. All workers of a DP rank call `forward` and `logits` for the same rows.
        """

    def kv_specs(self) -> tuple[KvSpec, ...]:
        """What each KV group keeps."""

    def keep_kv_in(self, dtype: torch.dtype) -> None:
        """The KV cache keeps `dtype` instead of the weights'; before `kv_specs` is asked. ConfigError if it cannot."""

    def forward(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        """Runs the layers over the T tokens of `inputs` and writes their KV.

        Returns the hidden states [S, d] after the final norm, of inputs.logits_index only.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, vocab_size] float32 of hidden states [S, d]."""


Loader = Callable[[ConfigFile, Checkpoint, Loading], Model]

ARCHITECTURES: Final[dict[str, Loader]] = {
    "DeepseekV2ForCausalLM": deepseek.load,
    "DeepseekV3ForCausalLM": deepseek.load,
    "Glm4MoeForCausalLM": glm4_moe.load,
    "LlamaForCausalLM": llama.load,
    "MistralForCausalLM": llama.load,
    "MixtralForCausalLM": mixtral.load,
    "Qwen2ForCausalLM": llama.load,
    "Qwen3ForCausalLM": llama.load,
    "Qwen3MoeForCausalLM": qwen3_moe.load,
}


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    progress: Callable[[float, int], None] = lambda share, read: None,
    dummy_weights: bool = False,
    kv_dtype: torch.dtype | None = None,
    sharding: Sharding = WHOLE,
) -> Model:
    """Loads a directory in Hugging Face's format; with `dummy_weights` of its config.json only, and random weights.

    `deterministic`: a row's bits depend neither on its batch, nor on chunking, nor on being computed again after a preemption.
    `Model.deterministic` says whether the family has that on the device.
    `kv_dtype` of the KV cache; None: that of the weights. `sharding`: which of the routed experts are loaded.
    `progress` is called with the loaded share, 0 to 1, and the bytes of weights read so far. Raises ConfigError naming the file and the field at fault.
    """
    config = ConfigFile(path)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise config.error("architectures", f"is {names!r}, expected a list of one name")
    loader = ARCHITECTURES.get(names[0])
    if loader is None:
        raise config.error("architectures", f"names {names[0]!r}, which is not one of {', '.join(ARCHITECTURES)}")
    fp8 = read_quantisation(config) is not None

    def open_checkpoint() -> AbstractContextManager[Checkpoint]:
        return DummyCheckpoint(device, fp8=fp8) if dummy_weights else SafetensorsCheckpoint(path, device)

    with open_checkpoint() as checkpoint:
        report: Progress = lambda share: progress(share, checkpoint.bytes_taken)  # noqa: E731
        model = loader(config, checkpoint, Loading(dtype, device, deterministic, open_checkpoint, report, sharding))
    if kv_dtype is not None:
        model.keep_kv_in(kv_dtype)
    return model
