"""Which mixer a model has: facts of its config decide."""

from __future__ import annotations

from aotgaudi.errors import SpecError
from aotgaudi.graphs.invariant import InvariantMixer
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


def mixer_of(model: ModelSpec, *, is_invariant: bool = False) -> Mixer:
    """Returns the mixer of a model's family, in the batch-invariant form if asked."""
    family = family_of(model)
    if family == "latent":
        return LatentMixer()
    if family == "compressed":
        return CompressedMixer(compressions_of(model))
    return InvariantMixer() if is_invariant else UniformMixer()


def require_modes(model: ModelSpec, *, is_invariant: bool, has_packed_weights: bool) -> None:
    """Raises SpecError for a mode in which the model's family was not shown to be right."""
    family = family_of(model)
    modes = (
        ("batch_invariant", is_invariant, "false"),
        ("quantization", has_packed_weights, "no quantization of weights"),
    )
    for name, is_on, expected in modes:
        if is_on and family != "uniform":
            raise SpecError(
                f"model.{name}",
                f"{model.model_type!r} has {family} attention, which has no such mode",
                expected,
            )
