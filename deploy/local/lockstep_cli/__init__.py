"""The `lockstep` command: serve on this machine, fetch models, chat, measure."""

from importlib.metadata import version

__version__ = version("lockstep-cli")
