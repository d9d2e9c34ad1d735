"""Which mixer a model has: facts of its config decide."""

from __future__ import annotations

from aotgaudi.errors import SpecError
from aotgaudi.graphs.mixers.base import Mixer
from aotgaudi.graphs.mixers.compressed import CompressedMixer
from aotgaudi.graphs.mixers.latent import LatentMixer
from aotgaudi.graphs.mixers.uniform import UniformMixer
from aotgaudi.spec.cache_rows import compressions_of, family_of, rows_missing
from aotgaudi.spec.model import ModelSpec


def require_mixer(model: ModelSpec, *, is_stateful: bool) -> None:
    """Raises SpecError, saying what is missing, for a model that no mixer serves.

    `is_stateful`: transformers marks it as a model whose state is more than keys and values.
    """
    missing = rows_missing(model)
    if missing is None and is_stateful and family_of(model) != "compressed":
        missing = "state (transformers marks it stateful) that its config does not describe"
    if missing is not None:
        raise SpecError(
            "model.config.model_type",
            f"{model.model_type!r} keeps more than attention's keys and values, and no mixer for it exists: {missing}",
            "use a model whose layers keep keys and values, latent rows, or compressed entries",
        )


def mixer_of(model: ModelSpec) -> Mixer:
    """Returns the mixer of a model's family."""
    family = family_of(model)
    if family == "latent":
        return LatentMixer()
    if family == "compressed":
        return CompressedMixer(compressions_of(model))
    return UniformMixer()


def require_packable(model: ModelSpec) -> None:
    """Raises SpecError unless graphs of the model's family were shown to be right with packed weights."""
    family = family_of(model)
    if family != "uniform":
        raise SpecError(
            "model.quantization",
            f"{model.model_type!r} has {family} attention, which has no such mode",
            "no quantization of weights",
        )
