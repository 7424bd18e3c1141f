"""Where the routed experts of a layer lie before anything is known of their loads: what workers load and schedulers assume."""

from __future__ import annotations

import numpy as np

from lockstep_common.errors import ConfigError
from lockstep_common.steps import U32


def initial_placement(experts: int, slots: int, ranks: int) -> U32:
    """The logical expert of each physical slot, [slots]. Slots [r S, (r + 1) S) are those of rank r, S = slots / ranks.

    Rank r holds S neighbouring experts from floor(r experts / ranks) on, wrapping around: without redundant slots slot p holds
    expert p; otherwise a rank's first slots are its own share, and the redundant ones copy the beginning of the next rank's,
    until loads say which experts deserve them. Each expert has at least one slot, and equal loads are spread equally if
    ranks divides experts.

    Raises ConfigError if slots cannot be shared out equally, or are fewer than the experts.
    """
    if ranks < 1 or experts < 1 or slots % ranks:
        raise ConfigError(
            f"{slots} expert slots are not a multiple of {ranks} ranks: choose the number of redundant experts so that "
            f"{experts} experts and they together are"
        )
    if slots < experts:
        raise ConfigError(f"{slots} expert slots are fewer than {experts} experts")
    first = np.arange(ranks) * experts // ranks
    return ((first[:, None] + np.arange(slots // ranks)) % experts).reshape(slots).astype(np.uint32)
