"""The step of a transformers model at one entry's static shapes, as an exported graph.

Nothing is baked in: weights, configuration constants, KV caches and step inputs are all inputs of the graph.
No checkpoint is read. Parameters are allocated and never written.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Union

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.errors import SpecError, first_line
from aotgaudi.graphs.export import export
from aotgaudi.graphs.forms import AtenForm, Form
from aotgaudi.graphs.hyper_connections import splitting
from aotgaudi.graphs.mixers.base import ATTENTION_NAME, Masks, Mixer, paged_attention
from aotgaudi.graphs.mixers.families import mixer_of, require_mixer
from aotgaudi.graphs.program import CacheSpec, TensorSpec
from aotgaudi.graphs.step_inputs import Window, mask_name
from aotgaudi.spec.cache_rows import CONFIG_KEYS
from aotgaudi.spec.limits import ServingLimits
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import json_floats

StepEntry = Union[PromptEntry, DecodeEntry]

_ATEN_FORM = AtenForm()

STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rope variants whose frequencies follow from the configuration alone. ``dynamic`` does not export, and
``longrope`` chooses by the longest position in the batch, so a result would depend on its batch mates."""


def build_model(config: dict[str, Any], dtype: str) -> Any:
    """Returns the ``...ForCausalLM`` (``PreTrainedModel``) of a config.json, with our attention and unwritten parameters.

    Raises SpecError for an unknown architecture, rope type, or a model without the needed hooks.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    model_type = config.get("model_type")
    try:
        hf_config = AutoConfig.for_model(**json_floats(config))
    except StrictDataclassError as error:
        raise SpecError(
            "model.config", _one_line(error), "as transformers' configuration class wants it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(
            "model.config.model_type", f"{model_type!r} is not usable: {error}", "see transformers"
        ) from error
    _check_rope(hf_config)
    described = described_by(hf_config.get_text_config(), dtype)
    require_mixer(described, is_stateful=False)
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=getattr(torch, dtype),
                attn_implementation=ATTENTION_NAME,
                experts_implementation="batched_mm",
            )
    except (ValueError, KeyError) as error:
        raise SpecError(
            "model.config.model_type",
            f"{model_type!r} is not supported: {first_line(error)}",
            "use a decoder-only text model",
        ) from error
    require_mixer(described, is_stateful=getattr(model, "_is_stateful", False))
    _keep_float32(model)
    model.tie_weights()  # Skipped with the initialisation. Without it a tied head would need a second weight.
    mixer_of(described).install(model)
    return model.eval().requires_grad_(requires_grad=False)


def _keep_float32(model: Any) -> None:
    """Makes float32 what transformers loads as float32 whatever the dtype is, such as the weights of routers.

    transformers does so in `from_pretrained` only.
    """
    kept = model._get_dtype_plan(model.dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in kept):
            tensor.data = tensor.data.float()


def cache_specs(
    config: Any, limits: ServingLimits, dtype: str, form: Form = _ATEN_FORM
) -> tuple[CacheSpec, ...]:
    """Returns the caches of every layer in order, as the rows of a transformers config say (`aotgaudi.spec.cache_rows`).

    Raises SpecError for a model without attention heads, and for blocks that would end inside a row.
    """
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        raise SpecError(
            "model.config.model_type",
            f"{config.model_type!r} has no attention heads",
            "use a decoder-only text model",
        )
    return form.caches(described_by(config, dtype), limits)


def described_by(config: Any, dtype: str) -> ModelSpec:
    """Returns what rows follow from, with the values that transformers fills in where a config.json has none."""
    values = {name: getattr(config, name, None) or None for name in CONFIG_KEYS}
    return ModelSpec.model_validate(
        {
            "name": config.model_type,
            "dtype": dtype,
            "config": {"model_type": config.model_type, **values},
        }
    )


def export_step(
    model: Any,
    entry: StepEntry,
    limits: ServingLimits,
    *,
    n_splits: int = 1,
    form: Form = _ATEN_FORM,
) -> torch.export.ExportedProgram:
    """Exports the step of `entry`. Inputs: those of `step_inputs`, then the caches by name.

    `n_splits`: into how many partial sums hyper-connections are split.
    """
    config = model.config.get_text_config()
    kind = _PromptStep if isinstance(entry, PromptEntry) else _DecodeStep
    mixer = form.mixer(described_by(config, _dtype(model)), limits)
    zeros_below = limits.block_size if form.pads_with_zeros else 0
    wrapper = kind(model, mixer, _windows(config), zeros_below)
    specs = step_inputs(model, entry, limits, form)
    inputs = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    traced = {
        spec.name: form.cache_to_trace(spec) for spec in cache_specs(config, limits, _dtype(model), form)
    }
    caches = {name: cache for name, (cache, _) in traced.items()}
    dynamic = {name: open_size for name, (_, open_size) in traced.items()}
    with warnings.catch_warnings(), splitting(model, n_splits):
        warnings.simplefilter("ignore")
        try:
            exported = export(wrapper, (inputs, caches), (dict.fromkeys(inputs), dynamic))
        except (
            torch._dynamo.exc.UserError,
            GuardOnDataDependentSymNode,
            TypeError,
            NotImplementedError,
        ) as error:
            raise SpecError(
                f"model ({model.config.model_type})", f"does not export: {first_line(error)}"
            ) from error
    return exported


def step_inputs(
    model: Any, entry: StepEntry, limits: ServingLimits, form: Form = _ATEN_FORM
) -> tuple[TensorSpec, ...]:
    """Returns every input that the step's graph may take. A program lists those that its graphs use."""
    config = model.config.get_text_config()
    return form.step_inputs(entry, limits, _windows(config), described_by(config, _dtype(model)))


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _windows(config: Any) -> tuple[Window, ...]:
    """Full attention, and the configuration's sliding window if there is one."""
    window = getattr(config, "sliding_window", None)
    return (None,) if window is None else (None, int(window))


class _Step(nn.Module):
    def __init__(self, model: Any, mixer: Mixer, windows: tuple[Window, ...], zeros_below: int) -> None:
        """Tokens whose slot is less than `zeros_below` are embedded as zeros."""
        super().__init__()
        self.model, self.mixer, self.windows = model, mixer, windows
        self.zeros_below = zeros_below

    def masks(self, inputs: dict[str, Tensor]) -> Masks:
        return {window: inputs.get(mask_name(window)) for window in self.windows}

    def logits(self, inputs: dict[str, Tensor], paged: object, keep: Tensor | int) -> Tensor:
        out = self.model(
            input_ids=inputs["input_ids"][None],
            position_ids=inputs["positions"][None],
            use_cache=False,
            logits_to_keep=keep,
            paged=paged,
        )
        logits: Tensor = out.logits[0]
        return logits


@contextlib.contextmanager
def _zeros_for_padding(model: Any, is_real_T: Tensor) -> Iterator[None]:
    """While active, padding is embedded as zeros, because devices skip rows of zeros.

    Norms, linear layers without bias and sums of them turn zeros into zeros again, and so does attention that sees nothing.
    A model with other operations computes its padding like real tokens.
    """

    def mask(_module: Any, _inputs: Any, embedded_1TX: Tensor) -> Tensor:
        return torch.where(is_real_T[None, :, None], embedded_1TX, 0)

    hook = model.get_input_embeddings().register_forward_hook(mask)
    try:
        yield
    finally:
        hook.remove()


class _PromptStep(_Step):
    def forward(self, inputs: dict[str, Tensor], caches: dict[str, Tensor]) -> Tensor:
        """Returns logits [b, vocab]."""
        state = self.mixer.prompt_state(caches, inputs, self.masks(inputs))
        with self.padding(inputs):
            return self.logits(inputs, state, inputs["logits_indices"])

    def padding(self, inputs: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
        if not self.zeros_below:
            return contextlib.nullcontext()
        return _zeros_for_padding(self.model, inputs["slots"] >= self.zeros_below)


class _DecodeStep(_Step):
    def forward(self, inputs: dict[str, Tensor], caches: dict[str, Tensor]) -> Tensor:
        """Returns logits [b, vocab]."""
        return self.logits(inputs, self.mixer.decode_state(caches, inputs, self.masks(inputs)), 0)


def _check_rope(config: Any) -> None:
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    groups = (
        [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    )
    for group in groups:
        rope_type = group.get("rope_type", "default")
        if rope_type not in STATIC_ROPE_TYPES:
            raise SpecError(
                "model.config.rope_parameters.rope_type",
                f"{rope_type!r} depends on the batch and cannot be compiled ahead of time",
                f"supported: {', '.join(sorted(STATIC_ROPE_TYPES))}",
            )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
