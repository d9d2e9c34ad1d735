"""The model of a launch: which directory it is in, and which of its files decide the code.

Every JSON file and every ``.py`` file of the directory counts, except `FILES_EXCLUDED`. A name on the hub is looked up in
the hub's local cache; nothing is fetched.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from aotgaudi.bundle.launch import ModelIdentity
from aotgaudi.digest import Digest
from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular
from aotgaudi.wrap.adapters.base import Flags
from aotgaudi.wrap.values import shown

FILES_EXCLUDED: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer*.json": "text to ids: no graph holds it",
        "vocab*.json": "text to ids: no graph holds it",
        "added_tokens.json": "text to ids: no graph holds it",
        "special_tokens_map.json": "text to ids: no graph holds it",
        "chat_template*.json": "messages to text",
        "*.index.json": "which file has which weights",
        "trainer_state.json": "of training",
        "all_results.json": "of training",
        "train_results.json": "of training",
        "eval_results.json": "of training",
    }
)

_CONFIGS = ("config.json", "params.json")
_SUFFIXES = (".json", ".py")
_DEPTH = 2
_LARGEST_BYTES = 32 << 20
_COMMIT_BYTES = 200
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def find_model(flags: Flags, environ: Mapping[str, str], cwd: Path) -> Path:
    """Returns the directory of a launch's model. Raises SpecError if it is neither a directory nor in the hub's cache."""
    path = cwd / flags.model
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise SpecError("model", f"is the file {shown(flags.model)}", "a directory with a config.json")
    if not _HUB_NAME.fullmatch(flags.model):
        raise SpecError(
            "model",
            f"there is no directory {shown(flags.model)}",
            "a model's directory, or a name on the hub",
        )
    for cache in _hub_caches(flags, environ):
        found = _snapshot(cache / f"models--{flags.model.replace('/', '--')}", flags.revision or "main")
        if found is not None:
            return found
    revision = f" --revision {flags.revision}" if flags.revision else ""
    raise SpecError(
        "model",
        f"{shown(flags.model)} is neither a directory nor in the hub's cache on this machine",
        f"fetch it first: hf download {flags.model}{revision}",
    )


def identify(name: str, directory: Path) -> ModelIdentity:
    """Returns the identity of a model. Raises SpecError if it has no configuration, or a file cannot be read."""
    try:
        files = {str(path.relative_to(directory)): path for path in _counted(directory)}
    except OSError as error:
        raise SpecError(str(directory), f"cannot be read: {error.strerror}", "a model's directory") from error
    if not any(config in files for config in _CONFIGS):
        raise SpecError(str(directory), f"has no {_CONFIGS[0]}", "a model's directory, whole")
    digests = {name: Digest.of(read_regular(path, _LARGEST_BYTES)) for name, path in sorted(files.items())}
    return ModelIdentity(name=name, files=digests)


def _counted(directory: Path, depth: int = _DEPTH) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.suffix in _SUFFIXES and path.is_file():
            if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in FILES_EXCLUDED):
                yield path
        elif depth and path.is_dir():
            yield from _counted(path, depth - 1)


def _hub_caches(flags: Flags, environ: Mapping[str, str]) -> Iterator[Path]:
    """Yields where models may lie: vLLM's ``--download-dir``, then the order of huggingface_hub/constants.py."""
    if flags.download_dir:
        yield Path(flags.download_dir)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            yield Path(environ[name])
    yield Path(hugging_face_home(environ)) / "hub"


def _snapshot(repository: Path, revision: str) -> Path | None:
    try:
        commit = read_regular(repository / "refs" / revision, _COMMIT_BYTES).decode().strip()
    except (OSError, ValueError, SpecError):
        commit = revision  # A commit has no reference.
    found = repository / "snapshots" / commit
    return found if any(os.path.exists(found / name) for name in _CONFIGS) else None


def hugging_face_home(environ: Mapping[str, str]) -> str:
    """Returns where the hub's client keeps models and modules (huggingface_hub/constants.py)."""
    if environ.get("HF_HOME"):
        return environ["HF_HOME"]
    cache = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME", "/root")) / ".cache")
    return str(Path(cache) / "huggingface")
