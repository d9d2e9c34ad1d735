"""How a model's hidden states become an embedding, and what a checkpoint for sentence-transformers says of it.

Such a checkpoint has ``modules.json``, a list of modules in the order in which they run, each with a folder::

    [{"path": "", "type": "sentence_transformers.models.Transformer"},
     {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},        <path>/config.json: which pooling
     {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]    there: embeddings have length 1
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from aotgaudi.errors import SpecError
from aotgaudi.files import read_regular
from aotgaudi.spec.base import SpecValue

Runner = Literal["generate", "pooling"]
PoolingType = Literal["LAST", "CLS", "MEAN"]
"""vLLM's names: the last token's hidden state, the first token's, or the mean over all tokens."""

MODULES = "modules.json"
_MAX_BYTES = 1 << 20
_MODES: Mapping[str, PoolingType] = MappingProxyType(
    {
        "pooling_mode_lasttoken": "LAST",
        "pooling_mode_cls_token": "CLS",
        "pooling_mode_mean_tokens": "MEAN",
        "lasttoken": "LAST",
        "cls": "CLS",
        "mean": "MEAN",
    }
)
"""sentence-transformers' names, older ones (a flag for each) and newer ones (values of ``pooling_mode``)."""

ENCODERS = frozenset(
    {
        *("albert", "bert", "bge", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra"),
        *("ernie", "esm", "eurobert", "flaubert", "gte", "jina_bert", "layoutlm", "longformer", "luke"),
        *("megatron-bert", "mobilebert", "modernbert", "mpnet", "new", "nomic_bert", "roberta"),
        *("roberta-prelayernorm", "roformer", "squeezebert", "t5", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet"),
    }
)  # fmt: skip
"""Model types whose tokens see those after them: they have no KV cache, and no graphs here."""


class PoolerSpec(SpecValue):
    """What an embedding is made of. `pooling_type` decides the graphs; the server normalizes to length 1 itself."""

    pooling_type: PoolingType = "LAST"
    normalize: bool = True


def require_causal(model_type: str, is_causal: object, is_bidirectional: object) -> None:
    """Raises SpecError for a model whose tokens see those after them, by its type or by these values of its config."""
    if model_type in ENCODERS:
        what = f"is {model_type!r}, an encoder, whose tokens see those after them"
    elif is_causal is False or is_bidirectional:
        key = "is_causal = false" if is_causal is False else "use_bidirectional_attention"
        what = f"is {model_type!r} with {key}: its tokens see those after them"
    else:
        return
    raise SpecError(
        "model.config.model_type",
        what,
        "a causal decoder, such as Qwen3-Embedding; encoders are not supported",
    )


def read_pooler(folder: Path) -> dict[str, Any]:
    """Returns the values of a `PoolerSpec` that the checkpoint in `folder` states; none if it has no modules.json.

    Raises SpecError for a file that cannot be used, and for modules and modes that this version does not compute.
    """
    modules = _read(folder / MODULES)
    if modules is None:
        return {}
    if not (isinstance(modules, list) and all(isinstance(module, dict) for module in modules)):
        raise SpecError(
            str(folder / MODULES), "holds no list of modules", "as sentence-transformers writes it"
        )
    found: dict[str, Any] = {"normalize": False}
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            found["pooling_type"] = _pooling_type(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise SpecError(
                str(folder / MODULES),
                f"has a module {kind[:64]!r}, which this version does not compute",
                "a model whose modules are Transformer, Pooling and Normalize, or [model.pooler] in the spec",
            )
    return found


def _pooling_type(path: Path) -> PoolingType:
    config = _read(path)
    if not isinstance(config, dict):
        raise SpecError(
            str(path), "is missing, or holds no JSON object", "the configuration of the pooling module"
        )
    stated = config.get("pooling_mode")
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [stated] if isinstance(stated, str) else chosen
    if len(modes) != 1 or modes[0] not in _MODES or config.get("include_prompt") is False:
        said = ", ".join(map(str, modes))[:200] or "none"
        rest = " without the prompt's tokens" if config.get("include_prompt") is False else ""
        raise SpecError(
            str(path),
            f"asks for pooling by {said}{rest}",
            f"one of {', '.join(get_args(PoolingType))} over all tokens, or [model.pooler] in the spec",
        )
    return _MODES[modes[0]]


def _read(path: Path) -> Any:
    """The JSON in a file; None if there is no such file."""
    try:
        return json.loads(read_regular(path, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(str(path), f"is not JSON: {error}") from error
