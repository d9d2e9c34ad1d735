"""The model's config as flags change it: ``--hf-overrides``, and in older releases ``--rope-scaling`` and ``--rope-theta``.

Sources: ``ModelConfig.__post_init__``, ``_apply_dict_overrides`` and ``_update_nested`` in vllm/config/model.py
(vllm/config/__init__.py in 0.10, vllm/config.py before), ``get_config`` and ``patch_rope_parameters`` in
vllm/transformers_utils/config.py, ``get_rope`` in vllm/model_executor/layers/rotary_embedding. From 0.11.2 on, objects are
applied after vLLM has completed the config's RoPE, so nothing completes one that they bring: it must have all of its keys.
From 0.13 on that RoPE is ``rope_parameters``, and an object replaces it under both names.
``tests/golden/vllm_overrides.py`` asks vLLM itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotgaudi.commands.words import parse_table
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.model import ORIGINAL, PARAMETERS, TRANSFORMERS_5, release_numbers

_OVERRIDES, _SCALING, _THETA = "hf-overrides", "rope-scaling", "rope-theta"
_ROPES = ("rope_scaling", "rope_parameters")
_NEED_ORIGINAL = ("yarn", "deepseek_yarn", "deepseek_llama_scaling", "llama3", "longrope")

_PLAIN_OBJECTS = frozenset({"quantization_config", "compression_config", "speculators_config"})
"""Keys in ``_config`` whose value vLLM keeps as it is. All other such keys hold the config of a part of the model."""

_CLASS_KEYS = ("architectures", "model_type", "auto_map")
"""What chooses the classes of model and config, which may read other keys, or form other steps (pooling)."""

_MERGING = (0, 11)
"""From here on an override of a part's config changes single keys. Before, it replaces the part's config."""


def overridden(
    config: Mapping[str, Any], values: Mapping[str, str], release: str
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Returns the config that `release` of vLLM makes of a config.json and a command's flags, and notes.

    Raises:
        SpecError: a flag that the release does not have, an override with which vLLM does not start, or one that chooses
            the model's class.
    """
    given = _given(values, release)
    if not given:
        return config, ()
    overrides = _Overrides(release, values)
    # vLLM applies objects last.
    ordered = dict(sorted(given.items(), key=lambda item: isinstance(item[1], dict)))
    changed = overrides.changed(config, ordered, "")
    return changed, (f"the spec has the config with {', '.join(given)} changed", *overrides.notes)


def _given(values: Mapping[str, str], release: str) -> dict[str, Any]:
    """Returns the overrides of a command. --rope-scaling and --rope-theta win over --hf-overrides."""
    given = parse_table(_OVERRIDES, values[_OVERRIDES]) if _OVERRIDES in values else {}
    for flag in (_SCALING, _THETA):
        if flag in values and release_numbers(release) >= _MERGING:
            raise SpecError(f"--{flag}", f"is no flag of vLLM {release}", "--hf-overrides, an object in JSON")
    if scaling := parse_table(_SCALING, values.get(_SCALING, "{}")):
        given["rope_scaling"] = scaling
    if _THETA in values:
        try:
            given["rope_theta"] = float(values[_THETA])
        except ValueError:
            raise SpecError(f"--{_THETA}", f"is {shown(values[_THETA])}", "a number") from None
    return given


class _Overrides:
    """Applies overrides as a release does. Collects notes."""

    def __init__(self, release: str, values: Mapping[str, str]) -> None:
        self._name, self._release, self._values = release, release_numbers(release), values
        self.notes: list[str] = []

    def changed(self, config: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns `config` changed. `where` has the keys, each with a dot, of the part that it is; empty for the whole."""
        changed = dict(config)
        for key, value in changes.items():
            before, place = config.get(key), f"{where}{key}"
            if key in _CLASS_KEYS and value != before:
                raise self._refused(place, "chooses the model's class", "a config.json with that")
            if key in _ROPES:
                self._set_rope(changed, key, value, where)
            elif isinstance(value, dict) and isinstance(before, dict) and (where or self._is_part(key)):
                changed[key] = self.changed(before, value, f"{place}.")
            elif key == "text_config" and not where:
                raise self._refused(place, "is no object in both", "keys of config.json's text_config")
            else:
                changed[key] = value
        return changed

    def _is_part(self, key: str) -> bool:
        is_part = key.endswith("_config") and key not in _PLAIN_OBJECTS
        if is_part and self._release < _MERGING:
            problem = f"replaces all of it: vLLM {self._name} does not start with that"
            raise self._refused(key, problem, "--model-config with that")
        return is_part

    def _set_rope(self, config: dict[str, Any], key: str, value: Any, where: str) -> None:
        """Sets the RoPE of a config. A part's has been completed, and keeps the keys that are not given."""
        has_parameters, is_object = self._release >= PARAMETERS, isinstance(value, dict)
        if self._release < TRANSFORMERS_5 and (
            key != (read := _ROPES[has_parameters]) or (has_parameters and not is_object)
        ):
            if has_parameters and (where or not is_object):  # It is read before vLLM completes the RoPE.
                raise self._refused(
                    where + key, f"may have no effect in vLLM {self._name}", f"an object {read}"
                )
            self.notes.append(f"--{_OVERRIDES} {where}{key}: this vLLM does not read it, but {read}")
            return
        if where and is_object:
            default = {"rope_type": "default"} if has_parameters else {}
            known = (config.get(name) for name in _ROPES[: 1 + has_parameters])
            old = next((rope for rope in known if isinstance(rope, dict) and rope), default)
            kind = value.get("rope_type", old.get("rope_type", old.get("type")))
            value = {**old, **value, "rope_type": kind}
            value.pop("type", None)
        if is_object and (value or not has_parameters):
            self._check_rope(where + key, value, config)
        for name in _ROPES if has_parameters else ():
            config.pop(name, None)
        config[key] = value

    def _check_rope(self, where: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raises SpecError for a RoPE that vLLM would have to complete."""
        name, outside = rope.get("rope_type"), config.get(ORIGINAL)
        missing = [] if isinstance(name, str) else ["rope_type"]
        missing += [ORIGINAL] if name in _NEED_ORIGINAL and ORIGINAL not in rope else []
        missing += ["factor"] if rope.get("factor", 1) is None else []
        if missing:
            problem = f"has no {missing[0]}: vLLM {self._name} does not start with that"
            raise self._refused(where, problem, "give it")
        if name == "yarn" and outside not in (None, rope[ORIGINAL]):
            raise self._refused(where, f"has another {ORIGINAL} than the config", f"{outside}")

    def _refused(self, key: str, problem: str, remedy: str) -> SpecError:
        flags = {name.replace("-", "_"): f"--{name}" for name in (_SCALING, _THETA) if name in self._values}
        return SpecError(flags.get(key, f"--{_OVERRIDES} {key}"), problem, remedy)
