"""Converts text to token ids and back with the `tokenizers` library, so that a server needs no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import tokenizers

from aotgaudi.bundle.model_directory import MAX_TOKENIZER_BYTES, TOKENIZER, ModelDirectory
from aotgaudi.errors import SpecError
from aotgaudi.llm.model_files import eos_token_ids, special_tokens

_MAX_KEPT_TEXTS = 16384
"""How many texts of single tokens are kept. A detokenizer needs one after each token (engine/detokenizer.py)."""


class Tokenizer:
    """A model's tokenizer. Immutable after construction; any thread may use it."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int] = ()) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._decode_one = lru_cache(_MAX_KEPT_TEXTS)(self._decode)
        self.eos_token_ids = frozenset(eos_token_ids)

    @cached_property
    def max_token_chars(self) -> int:
        """The length of the longest token in the tokenizer's alphabet. In practice no token stands for longer text.

        Scans the whole vocabulary once.
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=0)

    @property
    def special_tokens(self) -> dict[int, str]:
        """The special tokens by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @property
    def num_tokens(self) -> int:
        """How many tokens there are. Their ids may have gaps."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def num_added_tokens(self) -> int:
        """How many tokens it has besides those of its model (BPE, ...)."""
        return len(self._backend.get_added_tokens_decoder())

    @classmethod
    def load(cls, model: ModelDirectory) -> Tokenizer:
        """Reads ``tokenizer.json``, and the end-of-sequence ids from the files next to it.

        These are the ids that the configuration declares, and the id of the tokenizer's ``eos_token``.

        Raises:
            SpecError: there is no usable ``tokenizer.json``.
        """
        path, data = model.path / TOKENIZER, model.read(TOKENIZER, MAX_TOKENIZER_BYTES)
        if data is None:
            raise SpecError(
                str(path),
                "is missing",
                "save the model's fast tokenizer there: tokenizer.save_pretrained(DIR)",
            )
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # The library raises only bare Exceptions.
            raise SpecError(str(path), f"is not a usable tokenizer: {error}") from error
        eos_token = special_tokens(model).get("eos_token")
        own = None if eos_token is None else backend.token_to_id(eos_token)
        return cls(backend, eos_token_ids(model) | ({own} if own is not None else set()))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of `text`. `add_special_tokens` adds those that the model expects, usually a BOS."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Returns the token ids of each text. Releases the GIL."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def encode_ends(self, texts: Sequence[str], add_special_tokens: bool, max_len: int) -> list[list[int]]:
        """Returns at most `max_len` token ids for each text: the added special tokens, and the end of the text."""
        num_special = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        ends = []
        for encoding in self._backend.encode_batch(list(texts), add_special_tokens=False):
            encoding.truncate(max(max_len - num_special, 0), direction="left")
            ends.append(list(self._backend.post_process(encoding, None, add_special_tokens).ids)[-max_len:])
        return ends

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens. U+FFFD stands for bytes that are not UTF-8."""
        return self._decode_one(token_ids[0]) if len(token_ids) == 1 else self._decode(*token_ids)

    def _decode(self, *token_ids: int) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids`, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's string of each token; empty for an id that the vocabulary lacks."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, special or not; U+FFFD if it is only part of a character."""
        return str(self._backend.decode([token_id], skip_special_tokens=False))
