"""Text to token ids and back, by the `tokenizers` library: no transformers in the serving process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers

from aotgaudi.errors import SpecError
from aotgaudi.server.model_files import read_json_object


class Tokenizer:
    """A model's tokenizer. Immutable after construction; every method may be called from any thread.

    `vocab_size` is one more than the highest id, added tokens included. `max_token_chars` is the length of
    the longest token, in the tokenizer's own alphabet: in practice no token stands for more text than that.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int] = ()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.eos_token_ids = frozenset(eos_token_ids)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.max_token_chars = max(map(len, vocabulary), default=0)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Reads ``tokenizer.json``, and the end-of-sequence ids from the configuration files beside it.

        Raises:
            SpecError: there is no usable ``tokenizer.json``.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise SpecError(
                str(path),
                "is missing",
                "save the model's fast tokenizer there: tokenizer.save_pretrained(DIR)",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception for everything.
            raise SpecError(str(path), f"is not a usable tokenizer: {error}") from error
        return cls(backend, _eos_token_ids(model_dir, backend))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model wants around it (usually a BOS)."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Releases the GIL."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens; U+FFFD stands for bytes that are not UTF-8."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, of special ones too; U+FFFD where it is part of a character."""
        return str(self._backend.decode([token_id], skip_special_tokens=False))


def _eos_token_ids(model_dir: Path, backend: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids in generation_config.json, or else in config.json; and the tokenizer's own `eos_token`."""
    declared: object = None
    for name in ("generation_config.json", "config.json"):
        declared = read_json_object(model_dir / name).get("eos_token_id") if declared is None else declared
    ids = {item for item in (declared if isinstance(declared, list) else [declared]) if isinstance(item, int)}
    eos_token = special_tokens(model_dir).get("eos_token")
    own = backend.token_to_id(eos_token) if isinstance(eos_token, str) else None
    return frozenset(ids if own is None else ids | {own})


_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def special_tokens(model_dir: Path) -> dict[str, str]:
    """Special tokens by name (``bos_token``, ...); tokenizer_config.json wins over special_tokens_map.json.

    Raises:
        SpecError: one of the files is not JSON.
    """
    found: dict[str, str] = {}
    for file_name in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json_object(model_dir / file_name)
        for name in _SPECIAL_TOKEN_NAMES:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found
