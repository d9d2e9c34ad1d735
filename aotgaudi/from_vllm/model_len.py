"""How long sequences may be: what vLLM derives from a model's config.json, by release.

Source: ``_get_and_verify_max_len`` in vllm/config/model.py (vllm/config.py up to 0.10) and ``patch_rope_parameters`` in
vllm/transformers_utils/config.py; from 0.19.1 on also ``standardize_rope_params`` in transformers' modeling_rope_utils.py.
``tests/golden/vllm_lengths.py`` asks vLLM itself. tokenizer_config.json counts for pooling models alone (since 0.10.1), and
a sliding window only under --disable-sliding-window; a spec takes neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from aotgaudi.errors import SpecError, shown
from aotgaudi.spec.model import POSITION_KEYS

CONFIG = "the model's config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRules:
    """What differs between releases. The defaults are those of the newest.

    Attributes:
        since: the first release with these rules.
        yarn_multiplies: yarn's length is ``original_max_position_embeddings * factor``. Since vLLM's PR 56446 the config's
            own count is taken to be scaled already.
        longrope_shortens: without --max-model-len, longrope serves ``original_max_position_embeddings`` of the config.
        reads_parameters: ``rope_parameters`` counts where ``rope_scaling`` is not given, and an original count beside it
            replaces the one in it.
        standardizes: transformers 5: parameters may be given for each type of layer, a type that is not given is
            ``default``, and yarn's original count that of the config. (A factor of null is 1 in the same releases.)
    """

    since: tuple[int, ...]
    yarn_multiplies: bool = False
    longrope_shortens: bool = True
    reads_parameters: bool = True
    standardizes: bool = True


_NEWEST = LengthRules(since=(0, 30))
_0_19_1 = replace(_NEWEST, since=(0, 19, 1), yarn_multiplies=True)
_0_13 = replace(_0_19_1, since=(0, 13), standardizes=False)
_0_11_2 = replace(_0_13, since=(0, 11, 2), reads_parameters=False)
_0_9 = replace(_0_11_2, since=(0,), longrope_shortens=False)
_RULES = (_NEWEST, _0_19_1, _0_13, _0_11_2, _0_9)

_RELEASES: Mapping[str, str] = {"vllm-gaudi@091bbad": "0.27.1", "vllm-gaudi@v0.20.0rc0": "0.19.0"}
"""The vLLM of versions that no release of vLLM is named like. v0.20.0rc0 requires transformers 4."""

_FORK = "0.9.0.1"
"""The vLLM of vllm-fork's release for Gaudi 1.22, taken for all versions of the extension."""

_UNSCALED = frozenset({"longrope", "llama3"})
_UNSCALED_SINCE_0_30 = frozenset({"yarn", "deepseek_yarn", "deepseek_llama_scaling"})
_LEGACY = {"su": "longrope", "mrope": "default", "telechat3-yarn": "yarn"}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ORIGINAL = "original_max_position_embeddings"
_ORIGINAL_BY_DEFAULT = {"phi3": 4096}
"""What transformers fills in for a model type."""


@dataclass(frozen=True, slots=True)
class ServedLength:
    """What a release makes of a config.

    Attributes:
        vllm: the release of vLLM.
        by_default: the length without --max-model-len.
        most: the greatest --max-model-len that is taken without VLLM_ALLOW_LONG_MAX_MODEL_LEN.
        rule: how `by_default` follows from the config.
        rule_of_most: how `most` does.
    """

    vllm: str
    by_default: int
    most: float
    rule: str
    rule_of_most: str


def vllm_release(version: str) -> str:
    """Returns the release of vLLM that a version of the plugin, one of ``spec.bucketing.VersionName``, builds on."""
    _, _, name = version.partition("vllm-gaudi@")
    return _RELEASES.get(version) or (name.removeprefix("v") if name else _FORK)


def served_length(text: Mapping[str, Any], release: str) -> ServedLength | None:
    """Returns how long sequences `release` of vLLM serves for the keys of a language model; None if no key says.

    Raises:
        SpecError: a RoPE that this vLLM does not start with.
    """
    found = _positions(text)
    if found is None:
        return None
    key, positions = found
    rules = next(one for one in _RULES if one.since <= _numbers(release))
    rope_type, rope = _rope(text, rules, release)
    what, base, factor = key, positions, 1.0
    if not (rope_type in _UNSCALED or (not rules.yarn_multiplies and rope_type in _UNSCALED_SINCE_0_30)):
        factor = _factor(rope, rules, release)
        if rope_type == "yarn":
            what, base = _ORIGINAL, _yarn_original(text, rope, rules, positions, release)
    most = base * factor
    rule = f"{what} {base:,}" + (f" x factor {factor:g} ({rope_type})" if factor != 1 else "")
    limit = text.get("model_max_length")
    taken = max(most, limit) if _is_length(limit) else most
    original = text.get(_ORIGINAL, _ORIGINAL_BY_DEFAULT.get(str(text.get("model_type"))))
    if rope_type == "longrope" and rules.longrope_shortens and _is_length(original):
        return ServedLength(release, int(original), taken, f"{_ORIGINAL} {original:,} (longrope)", rule)
    return ServedLength(release, int(most), taken, rule, rule)


def _positions(text: Mapping[str, Any]) -> tuple[str, float] | None:
    """Returns the key that decides, and its count: the least, unless there is a model_max_length (Command-R)."""
    known = {name: text[name] for name in POSITION_KEYS if _is_length(text.get(name))}
    if not known:
        return None
    key = "model_max_length" if "model_max_length" in known else min(known, key=lambda name: known[name])
    return key, known[key]


def _rope(text: Mapping[str, Any], rules: LengthRules, release: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the type and the parameters of a config's RoPE. One that is given for each type of layer scales nothing."""
    names = ("rope_scaling", "rope_parameters") if rules.reads_parameters else ("rope_scaling",)
    where = next((name for name in names if text.get(name)), "")
    given = text.get(where)
    if not isinstance(given, dict) or "gemma3" in str(text.get("model_type")):
        return "default", {}
    if all(value is None or isinstance(value, dict) for value in given.values()):
        if not rules.standardizes:
            raise _refused(where, "is given for each type of layer", release, "one set of parameters")
        return "default", {}
    return _type(given, where, rules, release), given


def _factor(rope: Mapping[str, Any], rules: LengthRules, release: str) -> float:
    factor = rope.get("factor", 1.0)
    if factor is None and rules.standardizes:
        return 1.0
    if not _is_length(factor):
        raise _refused("rope_scaling", f"has the factor {shown(str(factor))}", release, "a number")
    return factor


def _type(rope: Mapping[str, Any], where: str, rules: LengthRules, release: str) -> str:
    """Returns the type of a RoPE. Raises SpecError if there is none, two, or one whose parameters are missing."""
    modern, legacy = rope.get("rope_type"), rope.get("type")
    if (
        rules.standardizes
        and legacy
        and modern
        and _LEGACY.get(legacy, legacy) != _LEGACY.get(modern, modern)
    ):
        raise _refused(
            where, f"has rope_type {shown(str(modern))} and type {shown(str(legacy))}", release, "one of them"
        )
    name = (modern or legacy) if rules.standardizes else (legacy or modern)
    if name is None and not rules.standardizes:
        raise _refused(where, "has no rope_type", release, "one of linear, dynamic, yarn, longrope, llama3")
    name = _LEGACY.get(str(name), str(name)) if name is not None else "default"
    missing = [key for key in _NEEDED.get(name, ()) if key not in rope]
    if missing:
        raise _refused(where, f"has no {missing[0]}, which {name} needs", release, "give it")
    return name


def _yarn_original(
    text: Mapping[str, Any], rope: Mapping[str, Any], rules: LengthRules, positions: float, release: str
) -> float:
    outside = text.get(_ORIGINAL) if rules.reads_parameters else None
    original = rope.get(_ORIGINAL) if outside is None else outside
    if original is None and rules.standardizes:
        original = text.get("max_position_embeddings", positions)
    if not _is_length(original):
        raise _refused("rope_scaling", f"has no {_ORIGINAL}, which yarn needs", release, "give it")
    return original


def _refused(where: str, problem: str, release: str, remedy: str) -> SpecError:
    return SpecError(f"{CONFIG}: {where}", f"{problem}: vLLM {release} does not start with that", remedy)


def _is_length(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and value > 0


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", release)[:4])
