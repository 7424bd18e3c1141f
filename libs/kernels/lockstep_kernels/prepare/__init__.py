"""Step preparation: positions and KV slots. Defined in `reference`, which is what runs on every device today."""

from lockstep_kernels.prepare.reference import slots, window

__all__ = ["slots", "window"]
