"""The served model: its configuration, as far as it decides what graphs look like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, model_validator

from aotgaudi.digest import Key, canonical_json
from aotgaudi.errors import SpecError
from aotgaudi.spec.base import SpecValue
from aotgaudi.spec.pooler import PoolerSpec, Runner, require_causal
from aotgaudi.spec.quantization import QuantizationSpec, WeightsDtype

CONFIG_KEYS_EXCLUDED: Mapping[str, str] = MappingProxyType(
    {
        "_name_or_path": "a path or a name; the same model elsewhere is the same graph",
        "_model_name_or_path": "a path or a name; the same model elsewhere is the same graph",
        "transformers_version": "the version that wrote the file; the one that builds is keyed as toolchain",
        "dtype": "the spec's own dtype decides, and is keyed",
        "torch_dtype": "the older name of dtype; the spec's own dtype decides, and is keyed",
        "bos_token_id": "used by tokenization, outside the graph",
        "eos_token_id": "used by the stop check, outside the graph",
        "unk_token_id": "used by tokenization, outside the graph",
        "initializer_range": "decides the values of untrained weights, which are inputs of the graph",
        "use_cache": "the step's own KV cache is used, whatever it says",
        "output_attentions": "the step returns logits only, whatever it says",
        "output_hidden_states": "the step returns logits only, whatever it says",
        "return_dict": "decides a Python return type, which is not in the graph",
        "id2label": "names of a classification head's outputs; the step has none",
        "label2id": "names of a classification head's outputs; the step has none",
    }
)
"""Keys of a model's config that are left out of its signature, each with the reason.

`pad_token_id` is not among them: it is an argument of the embedding's node in the graph. What is not named
here is in the signature, so a config key that a later transformers adds changes it until someone says why it
should not.
"""

POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
    "max_target_positions",
)
"""What models call the longest sequence that they are made for; the least of several counts (vllm/config/model.py)."""

STATE_KEYS = ("state_size", "lru_width", "attention_hidden_size")
"""What Mamba, RecurrentGemma and RWKV call the size of a state that their layers keep."""

_NESTED = "text_config"
"""Where multimodal configs keep the language model's keys."""


class ModelSpec(SpecValue):
    """A model. `config` is the content of its ``config.json``, with Hugging Face's key names.

    Never change `config` in place: it is part of a frozen value. `quantization` is None if only the checkpoint
    itself says how it is quantized. `batch_invariant`: a row's result does not depend on the other rows of its step,
    bit by bit (``graphs/invariant.py``). `runner`, as in vLLM: what the model is used for; with ``pooling`` it gives
    embeddings as `pooler` says, which is None otherwise.
    """

    ABSENT_BY_DEFAULT: ClassVar[frozenset[str]] = frozenset(
        {"quantization", "batch_invariant", "runner", "pooler"}
    )

    name: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"]
    config: dict[str, JsonValue]
    quantization: QuantizationSpec | None = None
    batch_invariant: bool = False
    runner: Runner = "generate"
    pooler: PoolerSpec | None = None

    @model_validator(mode="after")
    def _check_config(self) -> ModelSpec:
        if not isinstance(self.config.get("model_type"), str):
            raise SpecError(
                "model.config.model_type", "is missing", "the content of a Hugging Face config.json"
            )
        try:
            canonical_json(self.config)
        except ValueError as error:
            where = ".".join(["model.config", *_unhashable(self.config)])
            raise SpecError(where, str(error), "finite numbers, integers below 2**53") from error
        return self

    @model_validator(mode="after")
    def _fill_pooler(self) -> ModelSpec:
        if self.runner == "generate":
            if self.pooler is not None:
                raise SpecError(
                    "model.pooler", 'is given, but model.runner is "generate"', 'runner = "pooling"'
                )
            return self
        pooler = self.pooler or PoolerSpec()
        if self.batch_invariant and pooler.pooling_type == "MEAN":
            raise SpecError(
                "model.batch_invariant",
                "is true with pooler.pooling_type MEAN, whose sum depends on how a prompt is cut into chunks",
                "false, or another pooling type",
            )
        bidirectional = self.config_value("use_bidirectional_attention")
        require_causal(self.model_type, self.config_value("is_causal"), bidirectional)
        object.__setattr__(self, "pooler", pooler)  # Before anybody has seen the frozen value.
        return self

    @property
    def generates(self) -> bool:
        """Whether it generates tokens; a pooling model gives embeddings."""
        return self.pooler is None

    @property
    def matryoshka_dimensions(self) -> tuple[int, ...] | None:
        """The lengths to which embeddings may be cut, as the config says; None: to any up to the hidden size."""
        stated = self.config_value("matryoshka_dimensions")
        if isinstance(stated, list):
            return tuple(size for size in stated if type(size) is int and size > 0)
        return None if self.config_value("is_matryoshka") else ()

    @property
    def weights_dtype(self) -> WeightsDtype | None:
        """How our server packs the weights of linear layers when it loads a checkpoint; None: it does not."""
        return None if self.quantization is None else self.quantization.weights

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the architecture, e.g. ``llama``."""
        return str(self.config["model_type"])

    @property
    def num_layers(self) -> int:
        """Decoder layers. Raises SpecError when missing, as the properties below do."""
        return self._count("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self._count("hidden_size")

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return self._count("vocab_size")

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that the model is made for, in tokens, under any name that configs use."""
        known = [self._count(name) for name in POSITION_KEYS if self.states(name)]
        if not known and any(map(self.states, STATE_KEYS)):
            raise SpecError("model.config.model_type", *other_state(self.model_type))
        return min(known) if known else self._count(POSITION_KEYS[0])

    @property
    def intermediate_size(self) -> int:
        """Width of a dense layer's feed-forward part; of an expert's, if the config says of no dense layer."""
        return self._count("intermediate_size", "moe_intermediate_size")

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""
        return self._count("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; as many as query heads if the config does not say."""
        return self._count("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Width of a head; the hidden size divided by the query heads if the config does not say."""
        if self.config_value("head_dim") is None:
            return self.hidden_size // self.num_attention_heads
        return self._count("head_dim")

    @property
    def sliding_window(self) -> int:
        """How many tokens back a layer with a window reads, the token itself included."""
        return self._count("sliding_window")

    @property
    def index_head_dim(self) -> int:
        """Width of a key of the indexer."""
        return self._count("index_head_dim")

    @property
    def latent_dim(self) -> int | None:
        """Width of the latent vector that multi-head latent attention caches per token; None for other models."""
        if not self.states("kv_lora_rank"):
            return None
        return self._count("kv_lora_rank") + self._count("qk_rope_head_dim")

    def signature(self) -> Key:
        """Returns the key of everything in the model that a graph can depend on: one component a config key."""
        components = [("model.dtype", self.dtype), *_config_components("model.config", self.config)]
        if self.quantization is not None:
            for name, value in self.quantization.model_dump(mode="json").items():
                components.append((f"model.quantization.{name}", canonical_json(value).decode()))
        if self.batch_invariant:
            components.append(("model.batch_invariant", "true"))
        if self.pooler is not None:
            components.append(("model.pooler.pooling_type", self.pooler.pooling_type))
        return Key.of(components)

    def states(self, name: str) -> bool:
        """Whether the config has a value of this name, in its language model's part or outside it."""
        return self.config_value(name) is not None

    def config_value(self, name: str) -> JsonValue:
        """Returns a value of the config, from its language model's part or from outside it; None if it has none."""
        nested = self.config.get(_NESTED)
        value = self.config.get(name)
        return nested.get(name) if value is None and isinstance(nested, dict) else value

    def _count(self, name: str, fallback: str = "") -> int:
        value = self.config_value(name)
        if value is None and fallback and self.states(fallback):
            return self._count(fallback)
        if type(value) is not int or value < 1:
            problem = "is missing" if value is None else f"is {value!r}"
            raise SpecError(f"model.config.{name}", problem, "a positive integer")
        return value


def _unhashable(value: JsonValue) -> Iterator[str]:
    """Yields the keys that lead to the first value that has no canonical form."""
    items: Iterable[tuple[object, JsonValue]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for name, item in items:
        try:
            canonical_json(item)
        except ValueError:
            yield str(name)
            yield from _unhashable(item)
            return


def other_state(model_type: str) -> tuple[str, str]:
    """Returns why a model is refused whose layers keep state besides keys and values, and what would do."""
    problem = f"is {model_type!r}, whose layers keep state other than the keys and values of attention: not supported"
    return problem, "a model with attention in its layers"


def _config_components(prefix: str, config: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    for name in sorted(config.keys() - CONFIG_KEYS_EXCLUDED.keys()):
        value = config[name]
        if name == _NESTED and isinstance(value, dict):
            yield from _config_components(f"{prefix}.{name}", value)
        else:
            yield f"{prefix}.{name}", canonical_json(value).decode()
