"""The model's config as flags change it: ``--hf-overrides``, and in older releases ``--rope-scaling`` and ``--rope-theta``.

Sources: ``ModelConfig.__post_init__``, ``_apply_dict_overrides`` and ``_update_nested`` in vllm/config/model.py
(vllm/config/__init__.py in 0.10, vllm/config.py before), ``get_config`` and ``patch_rope_parameters`` in
vllm/transformers_utils/config.py, ``get_rope`` in vllm/model_executor/layers/rotary_embedding. From 0.11.2 on, objects are
applied after vLLM has completed the config's RoPE, so nothing completes one that they bring: it must have all of its keys.
``tests/golden/vllm_overrides.py`` asks vLLM itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotgaudi.commands.words import parse_table
from aotgaudi.errors import SpecError, shown
from aotgaudi.from_vllm.model import release_numbers

_OVERRIDES, _SCALING, _THETA = "hf-overrides", "rope-scaling", "rope-theta"
_ROPES = ("rope_scaling", "rope_parameters")
_ORIGINAL = "original_max_position_embeddings"
_NEED_ORIGINAL = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling", "llama3", "longrope"})

_PLAIN_OBJECTS = frozenset({"quantization_config", "compression_config", "speculators_config"})
"""Keys in ``_config`` whose value vLLM keeps as it is. All other such keys hold the config of a part of the model."""

_CLASS_KEYS = ("architectures", "model_type", "auto_map")
"""What chooses the classes of model and config, which may read other keys, or form other steps (pooling)."""

_MERGING = (0, 11)
"""From here on an override of a part's config changes single keys. Before, it replaces the part's config."""
_WITH_PARAMETERS = (0, 13)
_TRANSFORMERS_5 = (0, 19, 1)
"""From here on ``rope_scaling`` is another name of ``rope_parameters``. From 0.13 on it is only read before overrides."""


def overridden(
    config: Mapping[str, Any], values: Mapping[str, str], release: str
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Returns the config that `release` of vLLM makes of a config.json and a command's flags, and notes.

    Raises:
        SpecError: a flag that the release does not have, an override with which vLLM does not start, or one that chooses
            the model's class.
    """
    overrides = _Overrides(config, release, _given(values, release))
    return overrides.applied(), overrides.notes


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
    """One application of overrides to a config. Collects notes."""

    def __init__(self, config: Mapping[str, Any], release: str, given: Mapping[str, Any]) -> None:
        self._config, self._given = config, given
        self._release, self._dies = release_numbers(release), f"vLLM {release} does not start with that"
        self.notes: tuple[str, ...] = ()

    def applied(self) -> Mapping[str, Any]:
        if not self._given:
            return self._config
        self._check_classes(self._config, self._given, "")
        self.notes = (f"--{_OVERRIDES}: the spec has the config with {', '.join(self._given)} changed",)
        config = dict(self._config)
        for key, value in sorted(self._given.items(), key=lambda item: isinstance(item[1], dict)):
            if key in _ROPES:
                self._set_rope(config, key, value)
            elif isinstance(value, dict) and key.endswith("_config") and key not in _PLAIN_OBJECTS:
                config[key] = self._part(key, value)
            else:
                config[key] = value
        return config

    def _check_classes(self, config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
        for key, value in given.items():
            if key in _CLASS_KEYS and value != config.get(key):
                raise _refused(where + key, "chooses the model's class", "a config.json with that")
            if isinstance(value, dict) and isinstance(before := config.get(key), dict):
                self._check_classes(before, value, f"{where}{key}.")

    @property
    def _has_moved(self) -> bool:
        """Whether vLLM has moved ``rope_scaling`` into ``rope_parameters`` before it applies objects."""
        return _WITH_PARAMETERS <= self._release < _TRANSFORMERS_5

    def _set_rope(self, config: dict[str, Any], key: str, value: Any) -> None:
        """Replaces the RoPE of a whole config. Objects are set after vLLM has completed it, other values before."""
        if isinstance(value, dict):
            if key == "rope_scaling" and self._has_moved:
                self._ignore(key)
                return
            self._check_rope(key, value, config)
        if self._release >= (_WITH_PARAMETERS if isinstance(value, dict) else _TRANSFORMERS_5):
            for name in _ROPES:
                config.pop(name, None)
        config[key] = value

    def _ignore(self, where: str) -> None:
        self.notes += (f"--{_OVERRIDES} {where}: this vLLM does not read it any more, but rope_parameters",)

    def _check_rope(self, where: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raises SpecError for a RoPE that vLLM would have to complete."""
        name, outside = rope.get("rope_type"), config.get(_ORIGINAL)
        if rope and all(isinstance(part, dict) for part in rope.values()):
            raise _refused(where, "is given for each type of layer", "--model-config with that")
        if self._release < _WITH_PARAMETERS and where.endswith("rope_parameters"):
            return  # Not read.
        is_completed = (0, 10) <= self._release < _MERGING
        may_lack = "type" in rope if is_completed else not rope and self._release >= _WITH_PARAMETERS
        missing = [] if name or may_lack else ["rope_type"]
        missing += [_ORIGINAL] if name in _NEED_ORIGINAL and _ORIGINAL not in rope else []
        missing += ["factor"] if rope.get("factor", 1) is None else []
        if missing:
            raise _refused(where, f"has no {missing[0]}: {self._dies}", "give it")
        if name == "yarn" and outside not in (None, rope[_ORIGINAL]):
            raise _refused(where, f"has another {_ORIGINAL} than the config", f"{outside}")

    def _part(self, key: str, value: dict[str, Any]) -> dict[str, Any]:
        """Returns the changed config of a part of the model."""
        part = self._config.get(key)
        if self._release < _MERGING:
            raise _refused(key, f"replaces all of it: {self._dies}", "--model-config with that")
        if isinstance(part, dict):
            return self._merged(part, value, key)
        if key == "text_config":
            raise _refused(key, "is not in config.json", "its keys alone, or --model-config with that")
        return value

    def _merged(self, part: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
        merged = dict(part)
        for key, value in changes.items():
            before = part.get(key)
            if key in _ROPES:
                self._change_rope(merged, key, value, f"{where}.{key}")
            elif isinstance(value, dict) and isinstance(before, dict):
                merged[key] = self._merged(before, value, f"{where}.{key}")
            else:
                merged[key] = value
        return merged

    def _change_rope(self, part: dict[str, Any], key: str, value: Any, where: str) -> None:
        """Changes the RoPE of a part, which vLLM has completed: it has a type, from 0.13 on in ``rope_parameters``."""
        name = key
        if key == "rope_scaling" and self._has_moved and not (isinstance(value, dict) and part.get(key)):
            self._ignore(where)
            return
        if self._release >= _WITH_PARAMETERS:
            name = next((other for other in _ROPES if part.get(other)), key)
        before = part.get(name) or ({"rope_type": "default"} if self._release >= _WITH_PARAMETERS else None)
        if not isinstance(value, dict):
            before = None
        elif isinstance(before, dict):
            kind = value.get("rope_type", before.get("rope_type", before.get("type")))
            value = {**before, **value, "rope_type": kind}
            value.pop("type", None)
        if isinstance(value, dict):
            self._check_rope(where, value, part)
        if self._release >= _WITH_PARAMETERS:
            for other in _ROPES:
                part.pop(other, None)
        part[name] = value


def _refused(key: str, problem: str, remedy: str) -> SpecError:
    return SpecError(f"--{_OVERRIDES} {key}", problem, remedy)
