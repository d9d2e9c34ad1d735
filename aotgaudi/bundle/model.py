"""Binds a bundle to its model, and checks whether a directory holds the bundle's model."""

from __future__ import annotations

import os
from pathlib import Path

from aotgaudi.bundle.bundle import Bundle
from aotgaudi.bundle.model_directory import (
    CONFIG,
    TEXTS,
    TOOL_USE_TEMPLATE,
    WEIGHTS_REMEDY,
    ModelDirectory,
)
from aotgaudi.bundle.receipt import require_file_name
from aotgaudi.digest import Digest
from aotgaudi.document import load_foreign_object
from aotgaudi.errors import SpecError, UntrustedError, store_error
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import value_from_json


def bind_model(path: Path, spec: BuildSpec) -> dict[str, Digest]:
    """Returns the digest, by name, of every file that a server reads from the model directory at `path`.

    Raises SpecError if the directory cannot be served with bundles of `spec`.
    """
    model = ModelDirectory(path)
    check_model(spec, model)
    texts = (*TEXTS, TOOL_USE_TEMPLATE)
    names = [name for name in texts if os.path.lexists(path / name)] + model.weight_files()
    for name in names:
        try:
            require_file_name(name)
        except ValueError as error:
            raise SpecError(str(path), f"has a file that cannot be bound: {error}") from error
    try:
        return {name: model.digest(name) for name in names}
    except FileNotFoundError as error:
        raise SpecError(str(error.filename), "is missing", WEIGHTS_REMEDY) from error
    except OSError as error:
        raise store_error("read", path, error) from error


def open_model(bundle: Bundle, path: Path, *, allow_unbound: bool = False) -> ModelDirectory:
    """Returns the model directory to serve `bundle` with. None of its files has been read.

    Raises UntrustedError if a signature is required and does not cover a model, unless `allow_unbound`, or if others may
    write to the directory. Raises SpecError for a capture.
    """
    policy, bound = bundle.policy, bundle.require_programs().model
    if policy.signatures is not None and bound is None and not allow_unbound:
        raise UntrustedError(
            f"bundle {bundle.path} does not bind its model: trusted keys have signed for the code, not for weights,"
            " tokenizer and chat template (bind them: aotgaudi build bundle MANIFEST -o DIR --model DIR --sign-key"
            " FILE; or trust the directory: --allow-unbound-model)"
        )
    model = ModelDirectory(path, bound, policy.model_owners)
    model.check_owners()
    return model


def check_model(spec: BuildSpec, model: ModelDirectory) -> None:
    """Raises SpecError unless the directory's configuration gives the same graphs as the manifest's."""
    found = model_spec(model, spec.model.dtype).model_copy(
        update={"quantization": spec.model.quantization}  # Chosen by the builder; no config.json has it.
    )
    differences = spec.model.signature().differences(found.signature())
    if differences:
        name, wanted, got = differences[0]
        others = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise SpecError(
            str(model.path / CONFIG),
            f"is another model than the bundle was built for: {name} is {got}, the bundle has {wanted}{others}",
            f"serve {spec.model.name}, or build a bundle for this model",
        )


def model_spec(model: ModelDirectory, dtype: str) -> ModelSpec:
    """Returns the model of config.json, in `dtype`. Raises as the methods of `ModelDirectory` do."""
    data = model.read(CONFIG)
    if data is None:
        raise SpecError(str(model.path), f"has no {CONFIG}", "a Hugging Face model directory")
    where = str(model.path / CONFIG)
    config = load_foreign_object(data, where)
    try:
        return value_from_json(
            ModelSpec, {"name": model.path.name or "model", "dtype": dtype, "config": config}
        )
    except SpecError as error:
        raise SpecError(where, f"{error.where} {error.problem}", error.remedy) from error
