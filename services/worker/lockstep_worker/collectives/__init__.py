"""What the workers of a coupled group do together. `torch.distributed` is imported here and nowhere else."""

from lockstep_worker.collectives.groups import Alone, Coupled, Group, Membership, form
from lockstep_worker.collectives.record import CollectiveId, Recorder

__all__ = ["Alone", "CollectiveId", "Coupled", "Group", "Membership", "Recorder", "form"]
