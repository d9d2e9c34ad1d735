"""Hyper-connections (mHC): which token counts are warm, and the sizes that a model's config states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.limits import LARGEST_LIMIT
from aotgaudi.spec.model import ModelSpec

MhcRule = Literal["sglang-pr25810", "sglang-deepgemm-off", "sglang-fma", "vllm-collapsed", "one"]

_MOST_STREAMS = 64
_MOST_ITERATIONS = 1000
_MARK = "hc_sinkhorn_iters"
"""The key that only full hyper-connections have; ``hc_mult`` alone is also hy_v4's, which has no Sinkhorn."""

_DEFAULTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "deepseek_v4": {"hc_mult": 4, _MARK: 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6},
        "glm5_next": {"hc_mult": 4, _MARK: 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-5},
        "glm5_next_text": {"hc_mult": 4, _MARK: 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-5},
    }
)
"""What transformers 5.23 fills in where a config leaves the key out, by model type."""


class MhcSpec(SpecValue):
    """Which rule chooses the token counts, and the largest one.

    `enabled`: None has them for a model with hyper-connections on a CUDA target, as upstream does, and wherever our own
    engine runs such a model. True asks for them on any target. `rule`: where it is left out, a spec for our own engine
    on another target than CUDA has ``one``, unless `enabled` is true. `max_num_tokens`: None means
    ``limits.max_num_batched_tokens``; for our own engine, the most tokens that a step computes.
    """

    enabled: bool | None = None
    rule: MhcRule = "sglang-pr25810"
    max_num_tokens: int | None = Field(default=None, ge=1, le=LARGEST_LIMIT)


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """Sizes and constants of a model's hyper-connections; each layer has one for ``attn`` and one for ``ffn``.

    `hc_mult`: residual streams H. `hidden_size`: width D of each. `sinkhorn_iters`: pairs of row and column
    steps, the softmax with its column step being the first. `hc_eps`: added to `pre`, and Sinkhorn's.
    `rms_eps`: of the square mean that the mixing weights are divided by.
    """

    hc_mult: int
    hidden_size: int
    sinkhorn_iters: int
    hc_eps: float
    rms_eps: float

    @classmethod
    def of(cls, model: ModelSpec) -> HyperConnections | None:
        """Returns the hyper-connections of `model`; None if it has none with a Sinkhorn projection.

        A config has them where it, or its ``text_config``, has ``hc_sinkhorn_iters``, or is of a type whose
        default is to have them. Raises SpecError for values that are missing or impossible.
        """
        keys = _Keys(model.config)
        if keys.get(_MARK) is None:
            return None
        return cls(
            hc_mult=keys.count("hc_mult", _MOST_STREAMS),
            hidden_size=model.hidden_size,
            sinkhorn_iters=keys.count(_MARK, _MOST_ITERATIONS),
            hc_eps=keys.epsilon("hc_eps"),
            rms_eps=keys.epsilon("rms_norm_eps"),
        )

    @property
    def hc_hidden_size(self) -> int:
        """Width K = H * D of the flattened streams."""
        return self.hc_mult * self.hidden_size

    @property
    def num_mixes(self) -> int:
        """Mixing weights of a token, N = (2 + H) * H: `pre`, `post`, and `comb` by rows."""
        return (2 + self.hc_mult) * self.hc_mult


class _Keys:
    """A config's keys: its own, then its ``text_config``'s, then the type's defaults."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        tables = [config, *([text] if isinstance(text, dict) else [])]
        defaults = [_DEFAULTS.get(str(table.get("model_type")), {}) for table in tables]
        self._tables = (*tables, *defaults)

    def get(self, name: str) -> Any:
        return next((table[name] for table in self._tables if table.get(name) is not None), None)

    def count(self, name: str, most: int) -> int:
        value = self.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise _mistake(name, value, f"an integer from 1 to {most}")
        return value

    def epsilon(self, name: str) -> float:
        value = self.get(name)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise _mistake(name, value, "a number from 0 up to 1, e.g. 1e-6")
        return float(value)


def _mistake(name: str, value: Any, remedy: str) -> SpecError:
    problem = "is missing" if value is None else f"is {value!r}"
    return SpecError(f"model.config.{name}", problem, remedy)
