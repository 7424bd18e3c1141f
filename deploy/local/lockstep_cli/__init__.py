"""The `lockstep` command: serve on this machine, fetch models, chat, measure."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("lockstep-cli")
except PackageNotFoundError:  # found through PYTHONPATH, as where nothing can be installed
    __version__ = "not installed"
