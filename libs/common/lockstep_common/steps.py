"""The vocabulary of a step: what a scheduler decides (`Plan`) and what a worker reports (`PlanOutcome`).

These frozen values are what both services compute with. The protobuf form stops at their edges: the scheduler's
`client.py` writes plans and reads outcomes, the worker's `server.py` reads plans and writes outcomes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

NO_U32: Final[U32] = np.zeros(0, np.uint32)
NO_U64: Final[U64] = np.zeros(0, np.uint64)
NO_F32: Final[F32] = np.zeros(0, np.float32)
for _empty in (NO_U32, NO_U64, NO_F32):
    _empty.flags.writeable = False

NULL_BLOCK: Final = 0  # block 0 of every KV group: written by rows that must not write, never read by a live row

# An outcome word, low bits first: token 32 | row 20 | flags 12.
ROW_SHIFT: Final = 32
ROW_BITS: Final = 20
FLAG_SHIFT: Final = 52
MAX_ROWS: Final = 1 << ROW_BITS

MAX_LOGPROBS: Final = 20  # the most best tokens that a token's log probabilities can come with
MAX_PROMPT_SCORES: Final = 1 << 17  # numbers that the scores of a request's prompts may be: tokens x (n + 1)
MAX_STOP_IDS: Final = 32  # ids that end a choice, the model's own included
MAX_BIASES: Final = 1024  # tokens whose logits a request changes


class Flag(enum.IntFlag):
    """Flags of an outcome word. A word with END carries the row's last token, except with FAULT: that one has no token."""

    FIRST = 1  # the first token after the row was added
    STOP = 2  # ended: the token is one of the row's stop ids
    LENGTH = 4  # ended: the row reached its limit of tokens
    FAULT = 8  # ended: error (NaN in the logits, ...); the token is void
    END = STOP | LENGTH | FAULT


class Kind(enum.IntEnum):
    """What all ranks of a group do in one plan. The numbers are those of the wire."""

    PREFILL = 1
    DECODE = 2
    PARK = 3


@dataclass(frozen=True, slots=True)
class Header:
    """What every rank of the group must agree on; its serialized bytes are identical on all of them (P1)."""

    epoch: int
    seq: int
    kind: Kind
    first_step: int
    k: int
    row_bucket: int = 0
    micro_chunks: tuple[int, ...] = ()
    placement_version: int = 0
    moved_layer: int = -1  # counted among the layers with routed experts
    capture_bucket: int = 0
    report_loads: bool = False  # the plan's last outcome carries the expert loads counted since the last report
    moved_experts: tuple[int, ...] = ()  # the expert of each physical slot of `moved_layer` from this plan on
    dual_batch: bool = False  # each pass is computed as two halves: rows of one travel while the other computes


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; validated and complete (see `Sampling` in common.proto for ranges)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    max_tokens: int = 16
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1  # -1 none; 0 those of the prompt's tokens; n also those of the n best

    @property
    def plain(self) -> bool:
        """True if the logits are used as they are (no penalty, bias, or suppressed stop id)."""
        return (
            self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
            and self.min_tokens == 0
            and not self.bias
        )


@dataclass(frozen=True, slots=True)
class AddRow:
    """A choice takes a row. `tokens` is the prompt and, after a preemption, what was generated before it."""

    row: int
    request_id: str
    choice: int
    prompt_len: int
    tokens: U32
    computed: int
    blocks: tuple[U32, ...]  # one table a KV group
    sampling: Sampling
    limit: int


@dataclass(frozen=True, slots=True)
class TableWrite:
    """Table entries [starts[i], starts[i] + counts[i]) of rows[i] become the next counts[i] of `blocks`."""

    group: int
    rows: U32
    starts: U32
    counts: U32
    blocks: U32


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """One forward pass over the chunks [starts[i], starts[i] + counts[i]) of rows[i]."""

    rows: U32 = field(default_factory=lambda: NO_U32)
    starts: U32 = field(default_factory=lambda: NO_U32)
    counts: U32 = field(default_factory=lambda: NO_U32)


@dataclass(frozen=True, slots=True)
class Body:
    """One DP rank's part of a plan, applied in the order of its fields from `removes` on."""

    term: int
    ack: int
    notice: int = 0
    removes: U32 = field(default_factory=lambda: NO_U32)
    adds: tuple[AddRow, ...] = ()
    table_writes: tuple[TableWrite, ...] = ()
    zeroes: tuple[U32, ...] = ()  # blocks to zero, one array a KV group
    copies: tuple[tuple[U32, U32], ...] = ()  # (sources, destinations), one pair a KV group
    rows: U32 = field(default_factory=lambda: NO_U32)  # decode
    passes: tuple[PrefillPass, ...] = ()  # prefill


@dataclass(frozen=True, slots=True)
class Plan:
    """A header and the body of one rank. `header_bytes` is what was (or will be) sent: compared as it is. `data`: all of it as
    bytes, if it must be forwarded."""

    header: Header
    body: Body
    header_bytes: bytes = b""
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Ragged n best: counts[i] of `ids`/`values` (best first) belong to word (or token) number index[i]."""

    index: U32
    counts: U32
    ids: U32
    values: F32


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of m neighbouring tokens of a prompt, each under the model's distribution after the tokens before it."""

    logprobs: F32  # [m]
    ranks: U32  # [m]: 1 for the most probable token
    ids: U32  # [m, width]: the best tokens, best first
    values: F32  # [m, width]

    def __len__(self) -> int:
        return len(self.logprobs)

    def __getitem__(self, part: slice) -> PromptScores:
        return PromptScores(self.logprobs[part], self.ranks[part], self.ids[part], self.values[part])

    @classmethod
    def joined(cls, parts: Sequence[PromptScores]) -> PromptScores:
        """Of at least one part; all are equally wide."""
        return cls(
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.values for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Scores of the tokens [start, start + len(scores)) of a row's prompt; start is at least 1."""

    row: int
    start: int
    scores: PromptScores


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """(token, expert) pairs that one DP rank's workers have routed to each logical expert since the last report."""

    prefill: U32  # [layers, experts], layers with routed experts only
    decode: U32  # [layers, experts]
    steps: int  # forward passes that were counted

    def __post_init__(self) -> None:
        if self.prefill.ndim != 2 or self.prefill.shape != self.decode.shape:
            raise ValueError(f"loads are [layers, experts] twice, not {self.prefill.shape} and {self.decode.shape}")


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """Steps [first, first + steps) of plan `seq` as one DP rank ran them. `counts[i]` of `words` belong to step first + i."""

    epoch: int
    seq: int
    dp_rank: int
    first: int
    steps: int
    last: bool
    counts: U32
    words: U64
    logprobs: F32 = field(default_factory=lambda: NO_F32)  # one a word; empty if no row asked; NaN where not asked
    top: TopLogprobs | None = None
    faults: tuple[tuple[int, str], ...] = ()  # (row, why), for words with FAULT
    prompts: tuple[PromptChunk, ...] = ()  # of rows that asked for their prompt's scores
    step_ns: int = 0
    turnaround_ns: int = 0
    idle_ns: int = 0
    expert_loads: ExpertLoads | None = None  # with the last steps of a plan whose header asks for them


@dataclass(frozen=True, slots=True)
class KvGroup:
    kind: str
    block_size: int
    num_blocks: int
    dtype: str = ""  # of what it keeps


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a configured worker is and has."""

    model: str
    config_hash: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_rows: int
    weights_epoch: int
    groups: tuple[KvGroup, ...]
    deterministic: bool
    routed_experts: bool
    generated_reusable: bool = True  # KV of generated tokens has the bits that a prompt pass over them computes
    moe_layers: int = 0  # layers with routed experts whose loads are counted
    routed_expert_count: int = 0  # logical experts of such a layer
    expert_slots: int = 0  # physical slots for them over the whole group
    expert_groups: int = 1  # groups that the router chooses experts from
    dp: int = 1  # the place in a group that it was started for
    cp: int = 1
    rank: int = 0
    kept_epoch: int = 0  # whose plans were the last to write to the KV cache that it has; 0: the cache is empty
    max_batched_tokens: int = 0  # of a prefill pass that it has memory for


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A worker's place in an engine group and the sizes agreed for it."""

    epoch: int
    term: int
    rank: int
    dp_rank: int
    cp_rank: int
    dp: int
    cp: int
    store_host: str
    store_port: int
    max_rows: int
    max_model_len: int
    max_batched_tokens: int
    max_window: int
    num_blocks: int
    peers: tuple[str, ...] = ()
    capture_by_use: bool = False  # serve at once: decode steps are captured when their sizes have been used for a while


@dataclass(frozen=True, slots=True)
class RowState:
    row: int
    request_id: str
    choice: int
    offset: int
    blocks: tuple[U32, ...]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a scheduler needs to go on where another one stopped (P6)."""

    accepted: int
    started: int
    finished: int
    headers: tuple[bytes, ...]
    rows: tuple[RowState, ...]
    outcomes: tuple[PlanOutcome, ...]


def pack_words(tokens: npt.ArrayLike, rows: npt.ArrayLike, flags: npt.ArrayLike) -> U64:
    """Outcome words from tokens, rows and flags (arrays that broadcast against each other)."""
    words: U64 = (
        np.asarray(tokens).astype(np.uint64)
        | (np.asarray(rows).astype(np.uint64) << np.uint64(ROW_SHIFT))
        | (np.asarray(flags).astype(np.uint64) << np.uint64(FLAG_SHIFT))
    )
    return words


def unpack_words(words: U64) -> tuple[U32, U32, U32]:
    """(tokens, rows, flags) of outcome words."""
    tokens = words.astype(np.uint32)
    rows = (words >> np.uint64(ROW_SHIFT)).astype(np.uint32) & np.uint32(MAX_ROWS - 1)
    return tokens, rows, (words >> np.uint64(FLAG_SHIFT)).astype(np.uint32)


def u32(data: bytes) -> U32:
    """A packed array of the wire, without a copy (read-only)."""
    return np.frombuffer(data, "<u4")


def u64(data: bytes) -> U64:
    return np.frombuffer(data, "<u8")


def f32(data: bytes) -> F32:
    return np.frombuffer(data, "<f4")
