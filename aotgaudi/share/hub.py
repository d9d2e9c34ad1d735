"""Recognizes ids of models on the Hugging Face hub, and fetches the models' files."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from aotgaudi.errors import RemoteError, first_line

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_ANSWER_SECONDS = 5.0
_SETTINGS = re.compile(
    r"(HF_\w+|\w+_proxy|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|SSL_CERT_(FILE|DIR))", re.IGNORECASE
)
"""Variables that lead the hub's library, and what it speaks HTTP with."""


def is_hub_id(text: str) -> bool:
    """Returns whether `text` is the id of a model, ``ORG/NAME``, and not a path such as ``./a/b``, ``/a`` or ``a/b/c``."""
    return _ID.fullmatch(text) is not None


def fetch_model(model_id: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Returns a directory with the files of a model that match `patterns`, from the hub or from its cache.

    A hub that does not answer within five seconds is not asked again. With ``HF_HUB_OFFLINE``, only the cache is used.

    Raises RemoteError if neither has the model.
    """
    try:
        # It prints why it cannot be imported, and then raises that.
        with contextlib.redirect_stdout(io.StringIO()):
            from huggingface_hub import snapshot_download
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=list(patterns), etag_timeout=_ANSWER_SECONDS
        )
    except ModuleNotFoundError:
        raise
    except Exception as error:  # Of the library that speaks HTTP, and of the user's settings.
        led = sorted(name for name in os.environ if _SETTINGS.fullmatch(name))
        remedy = f" (the environment sets {', '.join(led)})" if led else ""
        raise RemoteError(f"{model_id} cannot be had from the hub: {first_line(error)}{remedy}") from error
    return Path(folder)
