"""Rows for samplers, and who may be drawn of them: the rules of graphs/sample_tokens.py, token by token in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Row:
    """The values of one row."""

    temperature: float = 1.0
    noise: float = 0.5
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def tensors(rows: list[Row]) -> list[torch.Tensor]:
    """The inputs of the operator but the logits."""
    columns = {
        name: [getattr(row, name) for row in rows]
        for name in ("temperature", "noise", "top_k", "top_p", "min_p")
    }
    dtypes = {"noise": torch.float64, "top_k": torch.int64}
    return [torch.tensor(values, dtype=dtypes.get(name, torch.float32)) for name, values in columns.items()]


def kept_weights(logits: torch.Tensor, row: Row) -> np.ndarray:
    """What each token weighs, in float64; 0 of those that a filter leaves out. Ties with the last one kept are kept."""
    scores = logits.double().numpy()
    weights = np.exp((scores - scores.max()) / np.float32(row.temperature))
    kept = np.ones(len(scores), dtype=bool)
    if row.top_k:
        kept &= scores >= np.sort(scores)[::-1][min(row.top_k, len(scores)) - 1]
    if row.min_p:
        kept &= weights >= np.float32(row.min_p)
    weights = np.where(kept, weights, 0)
    if row.top_p < 1:
        ordered = np.sort(weights)[::-1]
        reached = ordered.cumsum() >= np.float32(row.top_p) * ordered.sum()
        weights = np.where(weights >= ordered[reached.argmax()] * (1 - 1e-6), weights, 0)
    return weights


def may_be_drawn(token: int, logits: torch.Tensor, row: Row) -> bool:
    """Whether the noise falls on `token`, up to rounding of weights to float32."""
    if row.temperature == 0:
        return token == int(logits.double().argmax())
    weights = kept_weights(logits, row)
    after = weights.cumsum()
    at, slack = row.noise * after[-1], 3e-6 * after[-1]
    return bool(weights[token] > 0 and after[token] - weights[token] - slack <= at <= after[token] + slack)


def with_logits(vocab: int, dtype: torch.dtype, seed: int, kind: str) -> torch.Tensor:
    """Logits [vocab] on a grid, so that ties are exact and unequal weights differ by more than rounding."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(vocab, generator=generator)
    is_one = torch.arange(vocab) == seed % vocab
    values = {
        "flat": torch.zeros(vocab),
        "normal": 2.5 * noise,
        "peaked": 12 - 4 * torch.log1p(torch.randperm(vocab, generator=generator)) + noise,
        "two": torch.where(noise > 1, 1.0, -1.0),
        "masked": torch.where((noise > 0) | is_one, 3 * noise, -torch.inf),
        "alone": torch.where(is_one, 0.0, -torch.inf),
        "huge": 1e4 * noise,
    }[kind]
    return ((values * 8).round() / 8).to(dtype)


KINDS = ("flat", "normal", "peaked", "two", "masked", "alone", "huge")

rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    noise=st.sampled_from([0.0, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 400, 10**6]) | st.integers(0, 1000),
    top_p=st.sampled_from([1.0, 1e-6, 0.9, 0.999]) | st.floats(1e-3, 1 - 1e-6),
    min_p=st.sampled_from([0.0, 0.05, 1.0]) | st.floats(0, 1),
)
"""Rows of every kind; each filter is often off. In float32 a top-p closer to 1 is 1."""

plain = rows.map(lambda row: replace(row, top_k=0, top_p=1.0, min_p=0.0))
