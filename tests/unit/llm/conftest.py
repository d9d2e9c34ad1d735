"""A byte-level tokenizer without training."""

from __future__ import annotations

import functools

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from aotgaudi.llm.grammar_compiler import GrammarCompiler

BOS, EOS = "<s>", "</s>"


@pytest.fixture(scope="session")
def backend() -> tokenizers.Tokenizer:
    """One token a byte; BOS is 256, EOS is 257."""
    return make_backend()


@functools.cache
def make_grammars() -> GrammarCompiler:
    """Compiles grammars over these tokens."""
    return GrammarCompiler(make_backend().to_str(), None, [257])


def make_backend() -> tokenizers.Tokenizer:
    """One token a byte; BOS is 256, EOS is 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BOS, EOS])
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    return made
