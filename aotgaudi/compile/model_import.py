"""Converts any checkpoint that transformers reads into a directory that the server reads without transformers.

The server reads weights from safetensors, by the names of the model's modules. Most published checkpoints already have this
form. `import_model` converts the others: GGUF files, checkpoints whose names transformers converts while loading (mixtures
of experts), and models on the hub.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aotgaudi.backends.base import require_installed
from aotgaudi.errors import SpecError, StoreError, first_line, store_errors
from aotgaudi.files import lock_directory
from aotgaudi.share.hub import fetch_model, is_hub_id

_WEIGHTS = "model.safetensors"
_FETCHED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_REPLACED = ("config.json", "*.safetensors", "*.safetensors.index.json")
"""Files that ``overwrite`` removes first, because the server would read leftover shards of another checkpoint."""


def import_model(source: str, out: Path, dtype: str, *, overwrite: bool = False) -> None:
    """Writes the model `source` (a directory, a ``.gguf`` file or a hub id) to the directory `out`.

    `out` gets the configuration, the weights, the tokenizer and ``generation_config.json``. Existing files are replaced only
    with `overwrite`. `dtype` is ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's own.

    Raises:
        SpecError: `source` does not exist, transformers cannot read it, or `out` has files already.
        RemoteError: the hub does not have the model, or does not answer.
        StoreError: `out` cannot be written.
        MissingPackageError: an extra is not installed: [build], or [gguf] for a ``.gguf`` file.
    """
    require_installed("build", "torch", "transformers")
    _require_free(out, overwrite=overwrite)
    location, options = _locate(source)
    if Path(location).resolve() == out.resolve():
        raise SpecError(str(out), "is the source itself", "another directory")
    with _writable(out):
        _require_free(out, overwrite=overwrite)  # Another import may have ended meanwhile.
        model, tokenizer = _load(source, location, dtype, options)
        with store_errors("write", out):
            _save(model, tokenizer, out)


def _require_free(out: Path, *, overwrite: bool) -> None:
    try:
        is_taken = out.is_dir() and any(out.iterdir())
    except OSError as error:
        raise StoreError(f"cannot read {out}: {error.strerror}") from error
    if is_taken and not overwrite:
        raise SpecError(str(out), "is a directory with files in it", "another directory, or --force")


@contextlib.contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Creates `out`, so that one we may not write to fails before minutes of loading, and keeps other imports out of it."""
    with store_errors("write", out):
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    with lock_directory(out.resolve()) as is_ours:
        if is_ours is False:
            raise SpecError(str(out), "another import writes to it now", "another directory")
        yield


def _locate(source: str) -> tuple[str, dict[str, Any]]:
    """Returns a directory, and the options with which ``from_pretrained`` finds the model in it."""
    path = Path(source)
    if path.is_dir():
        _require_readable(path / "config.json")
        return source, {}
    if path.is_file():
        if path.suffix != ".gguf":
            raise SpecError(source, "is no model", "a directory, a .gguf file or a hub id")
        _require_readable(path)
        require_installed("gguf", "gguf", "accelerate")
        from transformers import GgufConfig

        return str(path.parent), {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    if path.suffix == ".gguf" or not is_hub_id(source):
        raise SpecError(source, "there is no such file or directory", "or a hub id, ORG/NAME")
    return str(fetch_model(source, _FETCHED)), {}


def _require_readable(path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}") from error


def _load(source: str, location: str, dtype: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns model and tokenizer. Never runs the model's code, reads pickles, or uses a network.

    If `trust_remote_code` is left out, transformers asks on standard input and runs the code of a model that somebody, or
    ``yes``, has said yes to (dynamic_module_utils.py, ``resolve_trust_remote_code``). An ``attn_implementation`` of a config
    may name a kernel of the hub.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {key: options[key] for key in ("gguf_file",) if key in options}
    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    weights = {"attn_implementation": "eager", **({} if names else {"use_safetensors": True})}
    try:
        model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype, **safe, **weights, **options)
        return model, AutoTokenizer.from_pretrained(location, **safe, **names)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SpecError(
            source, f"cannot be loaded: {first_line(error)}", "a directory, a .gguf file or a hub id"
        ) from error
    except Exception as error:  # Parsers of damaged files raise anything: struct.error, IndexError, ...
        raise SpecError(
            source,
            f"cannot be loaded: {type(error).__name__}: {first_line(error)}",
            "a whole file: this one is damaged or cut off; fetch it again",
        ) from error


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    """Writes the directory, ``config.json`` last, so that a directory with that file is complete."""
    for pattern in _REPLACED:
        for path in out.glob(pattern):
            path.unlink()
    _save_weights(model, out / _WEIGHTS)
    tokenizer.save_pretrained(out)
    model.generation_config.to_json_file(out / "generation_config.json")
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)


def _save_weights(model: Any, path: Path) -> None:
    """Writes the tensors. safetensors makes the file private to its owner, so we set the mode that the umask gives."""
    from safetensors.torch import save_file

    from aotgaudi.graphs.trace import stored_names

    path.touch()
    mode = path.stat().st_mode & 0o777
    state = model.state_dict()
    stored = sorted(set(stored_names(model).values()))
    save_file({name: state[name].contiguous() for name in stored}, path, metadata={"format": "pt"})
    path.chmod(mode)
