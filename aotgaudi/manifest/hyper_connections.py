"""The hyper-connection entries of a spec."""

from __future__ import annotations

from aotgaudi.bucketing.mhc_splits import MhcInputs, warm_up_buckets
from aotgaudi.entries import MhcEntry
from aotgaudi.errors import SpecError
from aotgaudi.spec.build_spec import BuildSpec
from aotgaudi.spec.hyper_connections import HyperConnections

_SUBLAYERS = ("attn", "ffn")
"""In the order in which SGLang PR #25810 warms them up (deepseek_v4.py, `prewarm_mhc_token_counts`)."""


def mhc_entries(spec: BuildSpec) -> tuple[MhcEntry, ...]:
    """Returns the hyper-connection entries in warm-up order: for each representative, attention, then ffn.

    ``mhc.enabled`` None is as upstream gates it: a CUDA target whose model has them. Where they are on,
    missing numbers of the device are an error; nothing is asked of the machine that enumerates.

    Raises:
        SpecError: they are asked for and the model has none, or the rule lacks something (see
            ``bucketing.mhc_splits.warm_up_buckets``).
    """
    streams = _streams(spec)
    if streams is None:
        return ()
    inputs = MhcInputs(
        max_num_tokens=spec.mhc.max_num_tokens or spec.limits.max_num_batched_tokens,
        hc_mult=streams.hc_mult,
        hidden_size=streams.hidden_size,
        num_sms=spec.target.resolved_num_sms,
    )
    return tuple(
        MhcEntry(bucket.last_token, bucket.n_splits, sublayer)
        for bucket in warm_up_buckets(spec.mhc.rule, inputs)
        for sublayer in _SUBLAYERS
    )


def _streams(spec: BuildSpec) -> HyperConnections | None:
    """Returns the hyper-connections that must be warm; None where none must."""
    if spec.mhc.enabled is False or (spec.mhc.enabled is None and spec.target.backend != "cuda"):
        return None
    streams = HyperConnections.of(spec.model)
    if streams is None and spec.mhc.enabled:
        raise SpecError(
            "mhc.enabled",
            f"is true, but {spec.model.model_type!r} has no hyper-connections with a Sinkhorn projection",
            "leave it out; a model that has them says hc_mult and hc_sinkhorn_iters in its config",
        )
    return streams
