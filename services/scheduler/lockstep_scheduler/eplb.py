"""Expert placement by load: which physical slot holds which routed expert, and which layer moves next. Pure: time comes in.

A layer's E logical experts lie in P >= E physical slots, P / R on each of R ranks; the tokens of an expert with several slots
are spread over them evenly. All ranks wait for the one with the most tokens, so what counts is

    ratio = load of the heaviest rank / mean load of the ranks        (at least 1; 1 if there is no load)

`rebalance` plans a placement from loads alone; `amend` changes the one there is until it is as even, which moves far fewer
experts; `settle` numbers ranks and slots of a new one so that few move, where that does not do. `Rebalancer` keeps the loads and
decides when a layer moves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from lockstep_common.errors import ConfigError
from lockstep_common.experts import initial_placement
from lockstep_common.steps import ExpertLoads, Header, WorkerFacts

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_TRACE: Final = 1e-9  # part of the heaviest load that an expert without load counts as: such ones are spread as equals
_SWAPS: Final = 16  # most swaps that even a packing out
_SWAP_GAIN: Final = 1e-3  # part of the heaviest load that a swap must take away
_ALIKE: Final = 0.01  # part by which the heaviest load may be above the one of a new placement to move fewer experts
_NOISE: Final = 0.01  # a threshold nearer to 1 moves no more than this one
_PENDING_REPORTS: Final = 4  # plans whose reports may be incomplete at the same time


# -- the planner --------------------------------------------------------------------------------------------------------


def rebalance(loads: npt.ArrayLike, slots: int, ranks: int, groups: int = 1, nodes: int = 1) -> I64:
    """A placement for loads [L, E]: the logical expert of each physical slot, [L, slots], rank by rank, node by node.

    The law, after DeepSeek's published load balancer (EPLB, 2025). If `nodes` divides `groups`, the experts of a group stay on
    one node, as routers that choose few groups then send few tokens between nodes:

    1. groups go onto nodes, equally many on each: the heaviest first, each onto the lightest node with room;
    2. within a node each expert gets one slot, and each slot left over goes to the expert with the most load a slot;
    3. the slots of a node go onto its ranks, equally many on each: the heaviest first, each onto the lightest rank with room;
    4. the heaviest rank swaps a slot with another one while both end up lighter than it was (so for groups and nodes in 1.).

    Otherwise the same with one group on one node. Ties go to the lowest number; experts without load count as equals. Each
    expert has at least one slot; two slots of one expert may lie on one rank. It is a heuristic: not always the best, and not
    always better than what was there.

    All layers are planned side by side: (slots - E) + slots + groups rounds of numpy over [L, E] or [L, ranks], and 16 at most
    over [L, slots / ranks, slots].
    ValueError if ranks does not divide slots, groups not E, or slots are fewer than E.
    """
    weights = np.asarray(loads, np.float64)
    layers, experts = weights.shape
    if slots < experts or slots % ranks or experts % groups:
        raise ValueError(f"{experts} experts in {groups} groups do not fit into {slots} slots on {ranks} ranks")
    if not _keeps_groups(slots, ranks, groups, nodes):
        groups = nodes = 1
    weights = _traced(weights)
    size = experts // groups
    by_node = _pack(weights.reshape(layers, groups, size).sum(2), nodes)  # [L, groups]
    members = (by_node[:, :, None] * size + np.arange(size)).reshape(layers * nodes, experts // nodes)
    held, share = _replicate(
        np.take_along_axis(weights, members.reshape(layers, experts), 1).reshape(members.shape), slots // nodes
    )
    packed = _pack(share, ranks // nodes)
    chosen = np.take_along_axis(members, np.take_along_axis(held, packed, 1), 1)
    return chosen.reshape(layers, slots)


def _traced(loads: F64) -> F64:
    top = loads.max(-1, keepdims=True)
    traced: F64 = np.maximum(loads, _TRACE * np.where(top > 0, top, 1))
    return traced


def _keeps_groups(slots: int, ranks: int, groups: int, nodes: int) -> bool:
    return groups % nodes == 0 and ranks % nodes == 0 and slots % nodes == 0


def _replicate(weights: F64, slots: int) -> tuple[I64, F64]:
    """(item of each slot, its load) [B, slots] for weights [B, n]: each item once, then the one with the most load a slot."""
    rows = np.arange(len(weights))
    count = np.ones(weights.shape)
    held = np.tile(np.arange(slots), (len(weights), 1))
    for slot in range(weights.shape[1], slots):
        heaviest = np.argmax(weights / count, axis=1)
        held[:, slot] = heaviest
        count[rows, heaviest] += 1
    return held, np.take_along_axis(weights / count, held, 1)


def _pack(weights: F64, bins: int) -> I64:
    """The items of weights [B, n] in the order of their bins, n / bins in each: heaviest first, into the lightest with room."""
    rows, items = np.arange(len(weights)), weights.shape[1]
    room = items // bins
    if room == 1 or bins == 1:
        return np.tile(np.arange(items), (len(weights), 1))
    packed = np.empty(weights.shape, np.int64)
    load = np.zeros((len(weights), bins))
    filled = np.zeros((len(weights), bins), np.int64)
    for item in np.argsort(-weights, axis=1, kind="stable").T:
        lightest = np.argmin(load, axis=1)
        packed[rows, lightest * room + filled[rows, lightest]] = item
        filled[rows, lightest] += 1
        load[rows, lightest] += weights[rows, item]
        load[filled == room] = np.inf
    return _exchange(weights, packed, bins, _SWAPS)


def _exchange(weights: F64, packed: I64, bins: int, swaps: int, enough: float = 0.0) -> I64:
    """`packed` after so many swaps between the heaviest bin and another one, the best one each time, as long as both end up
    lighter than the heaviest was, and that is heavier than `enough`."""
    rows = np.arange(len(weights))
    room = weights.shape[1] // bins
    packed = packed.copy()
    weight = np.take_along_axis(weights, packed, 1)
    for _ in range(swaps):
        load = weight.reshape(len(weights), bins, room).sum(2)
        heavy = np.argmax(load, axis=1)
        at = heavy[:, None] * room + np.arange(room)  # its places
        given = np.take_along_axis(weight, at, 1)[:, :, None] - weight[:, None, :]  # [B, room, n]
        top = load[rows, heavy][:, None, None]
        heavier = np.maximum(top - given, np.repeat(load, room, axis=1)[:, None, :] + given).reshape(len(weights), -1)
        best = np.argmin(heavier, axis=1)
        better = (heavier[rows, best] < top[:, 0, 0] * (1 - _SWAP_GAIN)) & (top[:, 0, 0] > enough)
        if not better.any():
            break
        i, j = (part[better] for part in (at[rows, best // weights.shape[1]], best % weights.shape[1]))
        for array in (packed, weight):
            array[rows[better], i], array[rows[better], j] = array[rows[better], j], array[rows[better], i]
    return packed


def amend(loads: npt.ArrayLike, present: npt.ArrayLike, ranks: int, enough: float) -> I64 | None:
    """`present` [P], changed step by step until no rank has more of loads [E] than `enough`; None if that does not get there.

    Experts get as many slots as `rebalance` would give them: what they have too many of goes to those that lack some, the
    heaviest first, onto the lightest rank with a slot to give. Then slots swap, as long as it helps, P / 2 times at most: more
    would move as much as a new placement.
    """
    old = np.asarray(present, np.int64)
    rank_of = np.arange(len(old)) * ranks // len(old)
    weights = _traced(np.asarray(loads, np.float64))
    wanted = np.bincount(_replicate(weights[None], len(old))[0][0])
    share = weights / wanted
    more = wanted - np.bincount(old, minlength=len(wanted))
    free = [int(slot) for expert in np.nonzero(more < 0)[0] for slot in np.nonzero(old == expert)[0][more[expert] :]]
    new = old.copy()
    load = np.bincount(rank_of, share[old])
    np.subtract.at(load, rank_of[free], share[old[free]])
    lacking = np.repeat(np.arange(len(wanted)), np.maximum(more, 0))
    for expert in lacking[np.argsort(-share[lacking], kind="stable")].tolist():
        slot = min(free, key=lambda slot: (load[rank_of[slot]], slot))
        free.remove(slot)
        new[slot] = expert
        load[rank_of[slot]] += share[expert]
    order = _exchange(share[new][None], np.arange(len(new))[None], ranks, len(new) // 2, enough)[0]
    new = new[order]
    if np.bincount(rank_of, share[new]).max() > enough:
        return None
    return _kept(old, new, ranks)


def settle(present: npt.ArrayLike, wanted: npt.ArrayLike, ranks: int, nodes: int = 1) -> I64:
    """A placement [P] that is as good as `wanted` and moves few experts away from `present` [P].

    Which rank takes which share of `wanted` makes no difference to the loads, so shares go to the ranks that hold most of them
    already (nodes first, if there are several), greedily; within a rank an expert that stays keeps its slot. O(R^2 (E + log R)).
    """
    old = np.asarray(present, np.int64)
    new = np.asarray(wanted, np.int64)
    best: I64 | None = None
    for order in (_match(old, new, ranks, nodes), np.arange(ranks)):  # greedy matching is not always the better one
        settled = _kept(old, new.reshape(ranks, -1)[order], ranks)
        if best is None or np.count_nonzero(settled != old) < np.count_nonzero(best != old):
            best = settled
    assert best is not None
    return best


def _match(old: I64, new: I64, ranks: int, nodes: int) -> I64:
    """order[r] = the share of `new` for rank r."""
    by_node = _pair(_overlap(old, new, nodes)) if nodes > 1 else np.zeros(1, np.int64)
    a_node = ranks // nodes
    old, new = old.reshape(nodes, -1), new.reshape(nodes, -1)
    return np.concatenate(
        [
            theirs * a_node + _pair(_overlap(old[mine], new[theirs], a_node))
            for mine, theirs in enumerate(by_node.tolist())
        ]
    )


def _overlap(old: I64, new: I64, parts: int) -> I64:
    """[parts, parts]: experts that part i of `old` and part j of `new` both hold."""
    experts = int(max(old.max(), new.max())) + 1
    mine, theirs = (np.zeros((parts, experts), np.float32) for _ in range(2))
    np.put_along_axis(mine, old.reshape(parts, -1), 1, 1)
    np.put_along_axis(theirs, new.reshape(parts, -1), 1, 1)
    return (mine @ theirs.T).astype(np.int64)


def _pair(overlap: I64) -> I64:
    """chosen[i] = j, a permutation: pairs in the order of their overlap, the largest first; those without any last."""
    chosen = np.full(len(overlap), -1, np.int64)
    taken = np.zeros(len(overlap), bool)
    mine, theirs = np.nonzero(overlap)
    for pair in np.argsort(-overlap[mine, theirs], kind="stable"):
        i, j = mine[pair], theirs[pair]
        if chosen[i] < 0 and not taken[j]:
            chosen[i], taken[j] = j, True
    chosen[chosen < 0] = np.nonzero(~taken)[0]
    return chosen


def _kept(old: I64, new: I64, ranks: int) -> I64:
    """[P]: `new` with the slots of each rank in the order in which as many as possible hold what they hold in `old`."""
    kept: list[int | None] = []
    for before, coming in zip(old.reshape(ranks, -1).tolist(), new.reshape(ranks, -1).tolist(), strict=True):
        slots: list[int | None] = []
        for expert in before:
            stays = expert in coming
            slots.append(expert if stays else None)
            if stays:
                coming.remove(expert)
        kept += [coming.pop(0) if expert is None else expert for expert in slots]
    return np.array(kept, np.int64)


def rank_loads(loads: F64, placement: I64, ranks: int) -> F64:
    """[L, R] from loads [L, E] and placement [L, P]: what each rank computes if an expert's tokens spread over its slots."""
    layers, experts = loads.shape
    at = placement + experts * np.arange(layers)[:, None]
    slots = np.bincount(at.ravel(), minlength=layers * experts).reshape(layers, experts)
    share = np.take_along_axis(loads / np.maximum(slots, 1), placement, 1)
    by_rank: F64 = share.reshape(layers, ranks, -1).sum(2)
    return by_rank


def balance_ratio(loads: F64, placement: I64, ranks: int) -> F64:
    """[L]: the heaviest rank's load over the mean; 1 for a layer without load."""
    by_rank = rank_loads(loads, placement, ranks)
    mean = by_rank.mean(1)
    ratio: F64 = np.divide(by_rank.max(1), mean, out=np.ones(len(loads)), where=mean > 0)
    return ratio


# -- loads and moves ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EplbPolicy:
    """When experts move; see config.py for what each option means."""

    enabled: bool = False
    window: float = 1000.0  # forward passes in which a load falls to 1/e
    interval: float = 60.0  # seconds between two plans
    threshold: float = 1.1  # ratio above which a layer is planned anew
    prefill_weight: float = 1.0  # of a pair counted in prefill, beside one counted in decode
    report_interval: float = 1.0  # seconds between two reports of the workers; 0: none
    nodes: int = 1  # of the group, with equally many ranks in a row each
    evidence: int = 256  # (token, expert) pairs an expert, on average, that a plan must rest upon


@dataclass(frozen=True, slots=True)
class Move:
    """A layer's experts from the next plan on."""

    layer: int  # among those with routed experts
    experts: tuple[int, ...]  # of each physical slot


@dataclass(frozen=True, slots=True)
class Balance:
    """Ratios of the last report under the placement that was in force when it came."""

    mean: float = 1.0  # over the layers
    worst: float = 1.0  # layer


class LoadSums:
    """Adds up what the DP ranks report for one plan."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._partial: dict[int, tuple[int, int, npt.NDArray[np.uint64]]] = {}  # by seq: ranks heard, steps, [2, L, E]

    def add(self, seq: int, loads: ExpertLoads) -> ExpertLoads | None:
        """The sum over all ranks when the last of them is in. Sums end at 2^32 - 1."""
        heard, steps, total = self._partial.pop(seq, (0, 0, np.zeros((2, *loads.prefill.shape), np.uint64)))
        heard, steps = heard + 1, max(steps, loads.steps)
        total += np.stack((loads.prefill, loads.decode))
        if heard < self._ranks:
            self._partial[seq] = (heard, steps, total)
            while len(self._partial) > _PENDING_REPORTS:  # a rank left one out: its next report holds what it counted
                del self._partial[min(self._partial)]
            return None
        prefill, decode = np.minimum(total, 2**32 - 1).astype(np.uint32)
        return ExpertLoads(prefill, decode, steps)


class Rebalancer:
    """The placement of one engine group under one epoch, what is known of the loads, and the move that comes next.

    The law. Loads of prefill and decode are kept apart, and fall to 1/e within `window` forward passes. When a report of all
    ranks is in, `interval` has gone by since the last plan (the first one need not wait), and the reports since then hold
    `evidence` pairs an expert, then each layer whose ratio is above `threshold` is planned anew. It moves if that takes away
    more of its ratio than a quarter of what the threshold allows, so that noise moves nothing; the layers that gain most go
    first. At most one moves in a plan, and what changes nothing is no move. A new plan replaces the moves not made yet.
    """

    def __init__(self, facts: WorkerFacts, ranks: int, dp: int, policy: EplbPolicy) -> None:
        """`ranks` = dp x cp workers share the experts; `dp` of them report. ConfigError if the slots do not fit the ranks."""
        layers, experts, slots = facts.moe_layers, facts.routed_expert_count, facts.expert_slots
        self._ranks, self._policy = ranks, policy
        self._groups = facts.expert_groups or 1
        if experts % self._groups:
            raise ConfigError(f"{experts} experts do not come in {self._groups} groups of one size")
        if policy.nodes < 1 or ranks % policy.nodes:
            raise ConfigError(f"--eplb-nodes {policy.nodes} does not divide the {ranks} ranks of the group")
        self._nodes = policy.nodes if _keeps_groups(slots, ranks, self._groups, policy.nodes) else 1
        self.placement: I64 = np.tile(initial_placement(experts, slots, ranks).astype(np.int64), (layers, 1))
        self.version = 0
        self.balance = {"prefill": Balance(), "decode": Balance()}
        self.plans = 0
        self.moved_slots = 0
        self._sums = LoadSums(dp)
        self._prefill, self._decode = np.zeros((2, layers, experts))
        self._evidence = 0.0  # pairs a layer since the last plan
        self._planned = -math.inf
        self._reported = -math.inf
        self._wanted: list[tuple[int, F64, I64]] = []  # layers to move, the last one next: loads, a placement for them
        self._next: Move | None = None

    # -- plans

    def report_due(self, now: float) -> bool:
        """Whether the next plan asks for loads."""
        return 0 < self._policy.report_interval <= now - self._reported

    def next_move(self) -> Move | None:
        """What the next plan moves in its prologue; the same until it is `sent`."""
        return self._next

    def sent(self, header: Header, now: float) -> None:
        """A plan has left: what its header moves and asks for is done."""
        if header.report_loads:
            self._reported = now
        if header.moved_layer >= 0:
            experts = np.array(header.moved_experts, np.int64)
            self.moved_slots += int(np.count_nonzero(experts != self.placement[header.moved_layer]))
            self.placement[header.moved_layer] = experts
            self.version = header.placement_version
            if self._next == Move(header.moved_layer, header.moved_experts):
                self._wanted.pop()
            self._prepare()

    # -- reports

    def add(self, seq: int, loads: ExpertLoads, now: float) -> None:
        """Books one DP rank's report of plan `seq`. ValueError if it is not about these experts."""
        if loads.prefill.shape != self._prefill.shape:
            raise ValueError(f"loads of {loads.prefill.shape} [layers, experts], not of {self._prefill.shape}")
        report = self._sums.add(seq, loads)
        if report is None:
            return
        kept = math.exp(-report.steps / self._policy.window)
        self._prefill = self._prefill * kept + report.prefill
        self._decode = self._decode * kept + report.decode
        self.balance = {"prefill": self._balance(report.prefill), "decode": self._balance(report.decode)}
        self._evidence += float(report.prefill.sum() + report.decode.sum()) / max(1, len(self.placement))
        if self._plan_due(now):
            self._plan(now)

    def _balance(self, counted: npt.NDArray[np.uint32]) -> Balance:
        ratios = balance_ratio(counted.astype(np.float64), self.placement, self._ranks)
        return Balance(float(ratios.mean()), float(ratios.max()))

    def _plan_due(self, now: float) -> bool:
        policy = self._policy
        enough = policy.evidence * self._prefill.shape[1]
        return policy.enabled and now - self._planned >= policy.interval and self._evidence >= enough

    def _plan(self, now: float) -> None:
        self._planned, self._evidence = now, 0.0
        loads = self._policy.prefill_weight * self._prefill + self._decode
        before = balance_ratio(loads, self.placement, self._ranks)
        (above,) = np.nonzero(before > self._policy.threshold)
        self._wanted.clear()
        if len(above):
            wanted = rebalance(loads[above], self.placement.shape[1], self._ranks, self._groups, self._nodes)
            gain = before[above] - balance_ratio(loads[above], wanted, self._ranks)
            worth = gain > before[above] * max(self._policy.threshold - 1, _NOISE) / 4
            order = np.argsort(gain, kind="stable")
            self._wanted = [(int(above[i]), loads[above[i]], wanted[i]) for i in order if worth[i]]
            self.plans += bool(self._wanted)
        self._prepare()

    def _prepare(self) -> None:
        self._next = None
        while self._wanted and self._next is None:
            layer, loads, wanted = self._wanted[-1]
            placed = self._nearest(self.placement[layer], loads, wanted)
            if (placed != self.placement[layer]).any():
                self._next = Move(layer, tuple(placed.tolist()))
            else:
                self._wanted.pop()

    def _nearest(self, present: I64, loads: F64, wanted: I64) -> I64:
        """A placement about as even as `wanted` that moves few experts away from `present`."""
        amended = None
        if self._nodes == 1:  # swaps know no groups
            heaviest = rank_loads(loads[None], wanted[None], self._ranks).max()
            amended = amend(loads, present, self._ranks, enough=float(heaviest) * (1 + _ALIKE))
        return settle(present, wanted, self._ranks, self._nodes) if amended is None else amended
