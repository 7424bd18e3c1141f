"""What the workers of a coupled group do together. `torch.distributed` is imported here and nowhere else."""

from lockstep_worker.collectives.communicator import Alone, Communicator, OverHost
from lockstep_worker.collectives.groups import ONLY, Group, Membership, Place, form
from lockstep_worker.collectives.record import PROLOGUE, CollectiveId, Recorder
from lockstep_worker.collectives.shared_memory import SharedMemory, share_memory

__all__ = [
    "ONLY",
    "PROLOGUE",
    "Alone",
    "CollectiveId",
    "Communicator",
    "Group",
    "Membership",
    "OverHost",
    "Place",
    "Recorder",
    "SharedMemory",
    "form",
    "share_memory",
]
