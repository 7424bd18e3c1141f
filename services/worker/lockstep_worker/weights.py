"""Directories in Hugging Face's format: config.json and safetensors. Every error names the file and the field in it.

`DummyCheckpoint` stands in for the safetensors where only speed matters (`--load-format dummy`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from lockstep_common.errors import ConfigError
from lockstep_worker.exchange.placement import WHOLE, Sharding

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Progress = Callable[[float], None]  # told the loaded fraction, 0 to 1


@dataclass(frozen=True, slots=True)
class Loading:
    """What the weights of a model become, and where. `deterministic`: a row's bits do not depend on its batch."""

    dtype: torch.dtype
    device: torch.device
    deterministic: bool
    reopen: Callable[[], AbstractContextManager[Checkpoint]]  # what is loaded, to read from it again
    progress: Progress = lambda share: None
    sharding: Sharding = WHOLE


_HEADER_DTYPES = {"F64", "F32", "F16", "BF16"}
_E4M3 = "F8_E4M3"
LARGEST: Final = 448.0  # of e4m3


class ConfigFile:
    """config.json as checked values. A field that is null counts as missing."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if the file is missing or is not a JSON object."""
        self.path = directory / CONFIG
        self.values = read_json(self.path)

    def get(self, field: str) -> Any:
        """The value as it stands, None if missing."""
        return self.values.get(field)

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._present(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"is {value!r}, expected a positive integer")
        return value

    def count(self, field: str, default: int | None = None) -> int:
        """An integer that may be 0."""
        value = self._present(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(field, f"is {value!r}, expected a number of at least 0")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number."""
        return positive(self._present(field, default), lambda why: self.error(field, why))

    def flag(self, field: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._present(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}, expected true or false")
        return value

    def error(self, field: str, why: str) -> ConfigError:
        """The error that names this file and `field`."""
        return ConfigError(f"{self.path}: {field} {why}", param=field)

    def _present(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        return value


def positive(value: Any, error: Callable[[str], ConfigError]) -> float:
    """`value` as a float if it is a positive number; raises error(why) otherwise."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise error(f"is {value!r}, expected a positive number")
    return float(value)


class Checkpoint(Protocol):
    """Where the tensors of a model come from; they arrive on the device that the checkpoint was opened for."""

    bytes_taken: int  # of tensors so far

    def __contains__(self, name: str) -> bool:
        """Whether there is such a tensor; only optional ones need asking for."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that is there."""
        ...

    def quantised(self, name: str) -> bool:
        """Whether the tensor `name` is e4m3, to be multiplied by scales that are tensors of their own."""
        ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor `name` in `dtype`. Raises ConfigError if it is missing, misshapen or not floating point, or of 8 bits
        unless `dtype` is e4m3."""
        ...

    def take_part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: int) -> torch.Tensor:
        """As `take`, of a tensor of this shape only what stands under `part` in its first dimension: [1, ...]."""
        ...

    def leave(self, name: str) -> None:
        """Other workers take the tensor `name`. Raises ConfigError if it is missing."""
        ...

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of every tensor by name: the same for one file and for shards."""
        ...

    def check_all_taken(self, ignored: tuple[str, ...] = ()) -> None:
        """Raises ConfigError if a tensor was not used: then the model is not what its architecture says.

        Names that end with one of `ignored` are passed over.
        """
        ...


class DummyCheckpoint:
    """Any tensor that is asked for, random: uniform(-0.035, 0.035), a seed for each name; gains of norms are 1.

    With a spread this wide a router chooses all experts about equally often, as trained ones do; weights much smaller would
    send every token the same way and make a mixture of experts look faster than it is.
    """

    _BOUND: Final = 0.035

    def __init__(self, device: torch.device, *, fp8: bool = False) -> None:
        """`fp8`: weights of projections are of 8 bits."""
        self.bytes_taken = 0
        self._fp8 = fp8
        self._generator = torch.Generator(device)

    def __enter__(self) -> DummyCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __contains__(self, name: str) -> bool:
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)  # nothing is there before it is asked for

    def quantised(self, name: str) -> bool:
        return self._fp8 and name.endswith("_proj.weight")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        stored = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
        tensor = torch.empty(shape, dtype=stored, device=self._generator.device)
        self.bytes_taken += tensor.numel() * dtype.itemsize
        if len(shape) == 1 and "norm" in name:
            return tensor.fill_(1)
        if "weight_scale" in name:
            return tensor.fill_(self._BOUND / LARGEST)
        self._generator.manual_seed(zlib.crc32(name.encode()))
        bound = self._BOUND if stored == dtype else LARGEST
        return tensor.uniform_(-bound, bound, generator=self._generator).to(dtype)

    def take_part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: int) -> torch.Tensor:
        raise KeyError(name)  # experts are never stacked here

    def leave(self, name: str) -> None:
        return None

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield "dummy", "", ()

    def check_all_taken(self, ignored: tuple[str, ...] = ()) -> None:
        return None


class SafetensorsCheckpoint:
    """The tensors of a directory: model.safetensors, or the shards that model.safetensors.index.json lists.

    Files are mapped into memory, so a tensor is read when it is taken, and converted where it arrives. Use as a context manager.
    """

    def __init__(self, directory: Path, device: torch.device | str = "cpu") -> None:
        """Reads the headers. Raises ConfigError naming the file, and the tensor if the index is at fault."""
        self.directory = directory
        self.bytes_taken = 0
        self._device = torch.device(device)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        self._taken: set[str] = set()
        try:
            self._where = self._locate()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._read(name, shape, dtype, slice(None))

    def take_part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: int) -> torch.Tensor:
        return self._read(name, shape, dtype, slice(part, part + 1))

    def leave(self, name: str) -> None:
        self._path(name)
        self._taken.add(name)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, part: slice) -> torch.Tensor:
        path = self._path(name)
        header = self._files[path].get_slice(name)
        if tuple(header.get_shape()) != shape:
            found = list(header.get_shape())
            raise ConfigError(f"{path}: tensor {name} has shape {found}, {CONFIG} implies {list(shape)}", param=name)
        wanted = _HEADER_DTYPES if dtype != torch.float8_e4m3fn else {_E4M3}
        if header.get_dtype() not in wanted:
            raise ConfigError(
                f"{path}: tensor {name} has dtype {header.get_dtype()}, which is not supported", param=name
            )
        self._taken.add(name)
        tensor: torch.Tensor = self._files[path].get_tensor(name) if part == slice(None) else header[part]
        self.bytes_taken += tensor.nbytes
        return tensor.to(self._device).to(dtype)

    def _path(self, name: str) -> Path:
        path = self._where.get(name)
        if path is None:
            raise ConfigError(f"{self.directory}: tensor {name} is missing from the safetensors files", param=name)
        return path

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def quantised(self, name: str) -> bool:
        path = self._where.get(name)
        return path is not None and self._files[path].get_slice(name).get_dtype() == _E4M3

    def headers(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        for name in sorted(self._where):
            header = self._files[self._where[name]].get_slice(name)
            yield name, header.get_dtype(), tuple(header.get_shape())

    def check_all_taken(self, ignored: tuple[str, ...] = ()) -> None:
        for name in sorted(self._where.keys() - self._taken):
            if not name.endswith(ignored):
                raise ConfigError(f"{self._where[name]}: tensor {name} is not part of the architecture", param=name)

    def _locate(self) -> dict[str, Path]:
        single, index = self.directory / SINGLE, self.directory / INDEX
        if single.is_file():
            return dict.fromkeys(self._open(single), single)
        if not index.is_file():
            raise ConfigError(f"{self.directory}: neither {SINGLE} nor {INDEX} is there; only safetensors are read")
        entries = read_json(index).get("weight_map")
        if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries.values()):
            raise ConfigError(f"{index}: weight_map is missing or is not a map of file names", param="weight_map")
        where = {}
        for name, file in entries.items():
            path = self.directory / Path(file).name
            if path not in self._files:
                self._open(path)
            if name not in self._files[path].keys():  # noqa: SIM118 (a safetensors file, not a dict)
                raise ConfigError(f"{index}: weight_map puts tensor {name} into {file}, which lacks it", param=name)
            where[name] = path
        return where

    def _open(self, path: Path) -> list[str]:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from None
        self._files[path] = file
        return list(file.keys())


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; raises ConfigError naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object")
    return value
