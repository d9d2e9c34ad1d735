"""Any checkpoint that transformers reads -> a directory that the server reads without transformers.

The server maps weights by the names of the model's own modules, from safetensors. Most published
checkpoints are like that already; this is for the others: GGUF files, checkpoints whose names transformers
converts while loading (mixtures of experts), hub ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aotgaudi.errors import SpecError, StoreError
from aotgaudi.graphs.trace import stored_names


def import_model(source: str, out: Path, dtype: str) -> None:
    """Loads `source` (directory, ``.gguf`` file or hub id) and writes config, weights and tokenizer to `out`.

    `dtype` is ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the checkpoint's own.
    Raises SpecError when transformers cannot read the source, StoreError when `out` cannot be written.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location, options = _location(source)
    try:
        model = AutoModelForCausalLM.from_pretrained(location, dtype=dtype, **options)
        names = {key: options[key] for key in ("gguf_file",) if key in options}
        tokenizer = AutoTokenizer.from_pretrained(location, **names)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SpecError(
            source,
            f"cannot be loaded: {str(error).strip().splitlines()[0]}",
            "a directory, a .gguf file or a hub id",
        ) from error
    try:
        _save(model, tokenizer, out)
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror or error}") from error


def _location(source: str) -> tuple[str, dict[str, Any]]:
    path = Path(source)
    if path.suffix != ".gguf":
        return source, {}
    if not path.is_file():
        raise SpecError(source, "there is no such file")
    from transformers import GgufConfig

    return str(path.parent), {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    """Writes the directory; ``config.json`` last, so that a directory with one is whole."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    stored = sorted(set(stored_names(model).values()))
    save_file(
        {name: state[name].contiguous() for name in stored},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokenizer.save_pretrained(out)
    model.generation_config.save_pretrained(out)
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
