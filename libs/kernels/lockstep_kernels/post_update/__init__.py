"""The end of a step. Defined in `reference`, which is what runs on every device today."""

from lockstep_kernels.post_update.reference import outcome_words

__all__ = ["outcome_words"]
