"""A small model with every kind of layer that a large one has, for the comparison with transformers. Imports torch.

*Layers*: the first of each kind, and one more. Two layers are of one kind if their modules have the same types, shapes and
switches, and the config's lists say the same of both. If no lists of the config choose the layers, all up to the first of
the last kind are taken, and one more. *Lengths* (windows and the like) become short, so that a short prompt crosses them.
Other *sizes* stay, unless the model would have more than `MOST_PARAMETERS` parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from aotgaudi.graphs.layer_reuse import LAYER
from aotgaudi.spec.model import ModelSpec
from aotgaudi.spec.parse import json_floats

MOST_PARAMETERS = 64_000_000
"""With this many, making random weights and a few steps take seconds on one core, and less than 1 GB."""

LENGTHS: Mapping[str, int] = MappingProxyType(
    {"sliding_window": 24, "attention_chunk_size": 40, "floor_scale": 32}
)
"""Config keys that say after how many tokens a layer computes otherwise, and the most that stays of each."""

_MOST_CHOSEN: Mapping[str, int] = MappingProxyType({"index_topk": 6})
_MOST_LAYERS = 16
_SMALL_VOCABULARY = 1024
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FEED_FORWARD = ("intermediate_size", "moe_intermediate_size")
_WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads")
_FEWEST_WIDE, _FEWEST_HEADS = 256, 2
_LAYERS, _TEXT = "num_hidden_layers", "text_config"

Make = Callable[[Mapping[str, Any]], nn.Module]
"""Builds transformers' own model of a config.json, on the current device."""


@dataclass(frozen=True)
class ReducedModel:
    """The small model, in float32, and what its layers are. `reduced`: sizes of its config that are not the model's own."""

    model: ModelSpec
    layers: tuple[str, ...]
    reduced: dict[str, int]

    def first(self, num_layers: int) -> ModelSpec:
        """Returns the model of the first layers only."""
        config = _with_layers(self.model.config, range(num_layers))
        return self.model.model_copy(update={"config": config})


def reduced_model(model: ModelSpec, make: Make, most_parameters: int = MOST_PARAMETERS) -> ReducedModel:
    """Returns the small model. Raises what transformers raises for a config that it cannot use."""
    config = _with_kinds(dict(model.config), make)
    lengths = {**LENGTHS, **_MOST_CHOSEN}
    full = full_config(config)
    reduced = {name: most for name, most in lengths.items() if _size(full, name) > most}
    config = _without_other_parts(_updated(config, reduced), make)
    while (before := _num_parameters(config, make)) > most_parameters:
        for changes in _smaller_sizes(full_config(config)):
            small = _updated(config, changes)
            if _num_parameters(small, make, otherwise=before) < before:
                config, reduced = small, {**reduced, **changes}
                break
        else:
            break
    num_layers = full_config(config).num_hidden_layers
    if num_layers < full_config(model.config).num_hidden_layers:
        reduced[_LAYERS] = num_layers
    small_model = model.model_copy(update={"config": config, "dtype": "float32"})
    return ReducedModel(small_model, tuple(_names(config, make)), dict(sorted(reduced.items())))


def _without_other_parts(config: dict[str, Any], make: Make) -> dict[str, Any]:
    """Returns the config with one layer in each part that reads images or sound: text does not pass through them."""
    names = ("num_hidden_layers", "num_layers", "depth")
    parts = {
        name: {**part, **{key: 1 for key in names if type(part.get(key)) is int}}
        for name, part in config.items()
        if isinstance(part, dict) and name.endswith("_config") and name != _TEXT
    }
    small = {**config, **parts}
    return small if parts and _num_parameters(small, make, otherwise=-1) > 0 else config


def full_config(config: Mapping[str, Any]) -> Any:
    """Returns transformers' configuration of the language model, with all defaults."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**json_floats(dict(config))).get_text_config()


def _size(full: Any, name: str) -> int:
    """Returns a whole number of a configuration; 0 without one."""
    value = getattr(full, name, None)
    return value if type(value) is int else 0


def _updated(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with values of its language model's part changed, under the names that it has them by."""
    names = full_config(config).attribute_map
    nested = config.get(_TEXT)
    own = dict(nested) if isinstance(nested, dict) else dict(config)
    for name, value in changes.items():
        own.pop(name, None)
        own[names.get(name, name)] = value
    return {**config, _TEXT: own} if isinstance(nested, dict) else own


def _with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Returns the config of the layers `chosen`: what it lists of each layer, it lists of these."""
    full = full_config(config)
    changes: dict[str, Any] = {
        name: [values[layer] for layer in chosen] for name, values in _lists(full).items()
    }
    for name, values in full.to_dict().items():
        if "layer" in name and isinstance(values, dict) and all(str(key).isdecimal() for key in values):
            by_layer = {int(key): value for key, value in values.items()}
            changes[name] = {str(i): by_layer[layer] for i, layer in enumerate(chosen) if layer in by_layer}
    return _updated(config, {**changes, _LAYERS: len(chosen)})


def _lists(full: Any) -> dict[str, list[Any]]:
    """Returns the lists of a configuration that have a value for each layer."""
    return {
        name: value
        for name, value in full.to_dict().items()
        if isinstance(value, list) and len(value) == full.num_hidden_layers and "token" not in name
    }


def _with_kinds(config: dict[str, Any], make: Make) -> dict[str, Any]:
    """Returns the config of as many layers as there are kinds, and one more."""
    kinds = _kinds(config, make)
    firsts = sorted({kind: number for number, kind in reversed(list(enumerate(kinds)))}.values())
    others = [number for number in range(len(kinds)) if number not in firsts]
    few = sorted([*firsts, *others[:1]])
    if len(few) <= _MOST_LAYERS:
        small = _with_layers(config, few)
        try:
            if set(_kinds(small, make)) == set(kinds):
                return small
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            pass  # Other keys of the config say which layers there are, and contradict this.
    return _with_layers(config, range(min(len(kinds), firsts[-1] + 2, _MOST_LAYERS)))


def _kinds(config: Mapping[str, Any], make: Make) -> list[Hashable]:
    """Returns the kind of each layer. Layers that differ only in fractions, such as constants of depth, are of one kind."""
    full, layers = full_config(config), _decoder_layers(config, make)
    said = list(_lists(full).values())
    return [
        (repr([values[number] for values in said]), _structure(layers[number]) if layers else None)
        for number in range(full.num_hidden_layers)
    ]


def _decoder_layers(config: Mapping[str, Any], make: Make) -> list[nn.Module]:
    """Returns the layers of the decoder without weights, in order; none where they are not where decoders have them.

    What reads images comes before the decoder.
    """
    with torch.device("meta"):
        named = make(config).named_modules()
    stacks: dict[str, list[nn.Module]] = {}
    for name, module in named:
        if (match := LAYER.search(f".{name}")) and match.end() == len(name) + 1:
            stacks.setdefault(name[: match.start()], []).append(module)
    num_layers = full_config(config).num_hidden_layers
    return next((stack for stack in reversed(stacks.values()) if len(stack) == num_layers), [])


def _structure(layer: nn.Module) -> Hashable:
    """Returns all but the numbers in a layer: types and shapes of its modules, and their switches."""
    return tuple(
        (
            name,
            type(module),
            tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)),
            tuple((n, str(v)) for n, v in sorted(vars(module).items()) if _is_switch(n, v)),
        )
        for name, module in layer.named_modules()
    )


def _is_switch(name: str, value: object) -> bool:
    is_place = name.startswith("layer_i") or name == "layer_number"
    return not is_place and (value is None or isinstance(value, (bool, int, str)))


def _num_parameters(config: Mapping[str, Any], make: Make, otherwise: int = 0) -> int:
    """Returns the number of parameters; `otherwise` for a config that transformers cannot use, if that is given."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make(config).parameters())
    except Exception:
        if not otherwise:
            raise
        return otherwise


def _smaller_sizes(full: Any) -> Iterator[dict[str, int]]:
    """Yields changes that make a model smaller: first of its vocabulary, then of experts, feed-forward parts and heads.

    Heads keep their size, and KV heads their share.
    """
    if _size(full, "vocab_size") > _SMALL_VOCABULARY:
        pad = {"pad_token_id": 0} if _size(full, "pad_token_id") >= _SMALL_VOCABULARY else {}
        yield {"vocab_size": _SMALL_VOCABULARY, **pad}
    fewest = max(8, 2 * _size(full, "num_experts_per_tok"), 4 * _size(full, "n_group"))
    if experts := {name: fewest for name in _EXPERTS if _size(full, name) > fewest}:
        yield experts
    wide = [name for name in _FEED_FORWARD if _size(full, name) > _FEWEST_WIDE and _size(full, name) % 2 == 0]
    yield from ({name: _size(full, name) // 2} for name in wide if _size(full, name) > full.hidden_size)
    widths = {name: _size(full, name) for name in _WIDTHS if _size(full, name) > 1}
    if _size(full, "num_attention_heads") > _FEWEST_HEADS and not any(n % 2 for n in widths.values()):
        yield {name: value // 2 for name, value in widths.items()}
    yield from ({name: _size(full, name) // 2} for name in wide)


def _names(config: Mapping[str, Any], make: Make) -> Iterator[str]:
    """Yields what each layer is: what the config's lists call it, else its class; and the parts that not all layers have."""
    full, layers = full_config(config), _decoder_layers(config, make)
    lists = [values for values in _lists(full).values() if all(isinstance(value, str) for value in values)]
    parts = [{type(part).__name__ for part in layer.children()} for layer in layers]
    common = set.intersection(*parts) if parts else set()
    for number in range(full.num_hidden_layers):
        said = [values[number] for values in lists]
        if layers:
            said = [*(said or [type(layers[number]).__name__]), *sorted(parts[number] - common)]
        yield ", ".join(said) or f"layer {number}"
