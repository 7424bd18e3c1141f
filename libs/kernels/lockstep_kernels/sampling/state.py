"""How each row samples, as device tensors with one entry a row: what `sample_rows` reads."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Feature(enum.IntFlag):
    """What a row's sampling needs beyond an argmax."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    MIN_TOKENS = 64
    STOP_IDS = 128
    LOGPROBS = 256
    SHAPED = RANDOM | PENALTIES | BIAS | MIN_TOKENS


class Float(enum.IntEnum):
    """Columns of the float parameters of a row."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


class Int(enum.IntEnum):
    """Columns of the integer parameters of a row."""

    SEED = 0
    CHOICE = 1
    TOP_K = 2
    MIN_LENGTH = 3  # length below which stop ids are suppressed
    FEATURES = 4  # Feature bits: the other parameters count only where their bit is set


@dataclass(frozen=True, slots=True)
class RowTables:
    """The sampling state of R rows."""

    floats: torch.Tensor  # [R, len(Float)] float32
    ints: torch.Tensor  # [R, len(Int)] int64
    stop_ids: torch.Tensor  # [R, s] int64; pad: repeat one, or -1
    bias_ids: torch.Tensor  # [R, b] int64, each id once; pad: any id, with value 0
    bias_values: torch.Tensor  # [R, b] float32
    lengths: torch.Tensor  # [R] int64: tokens of the sequence, which is the position of the token to draw
    counts: torch.Tensor | None  # [R, V] int32: times in the output; None: no row has penalties
    in_prompt: torch.Tensor | None  # [R, V] bool
