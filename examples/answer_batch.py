"""Answers a file of requests in the form of OpenAI's batch API (JSONL) from a running server.

    python examples/answer_batch.py REQUESTS ANSWERS [--server http://127.0.0.1:8000] [--at-once 32]

Stop it as you like, and run it again: it skips every custom_id that has an answer. Needs `pip install openai`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
from openai import APIStatusError, AsyncOpenAI, OpenAIError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--at-once", type=int, default=32)
    args = parser.parse_args()
    rows = waiting(args.requests, answered(args.answers))
    key = os.environ.get("OPENAI_API_KEY", "none")
    client = AsyncOpenAI(base_url=args.server, api_key=key, max_retries=10)
    with args.answers.open("a", encoding="utf-8") as out:
        try:
            asyncio.run(answer_all(client, rows, out, args.at_once))
        except OpenAIError as error:
            sys.exit(f"error: {error} (run it again to go on)")


def answered(path: Path) -> set[str]:
    """Returns the ids that have an answer. Cuts off a last line that a killed process left incomplete."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    return {json.loads(line)["custom_id"] for line in whole.splitlines()}


def waiting(path: Path, done: set[str]) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines if line.strip())
        yield from (row for row in rows if row["custom_id"] not in done)


async def answer_all(client: AsyncOpenAI, rows: Iterator[dict[str, Any]], out: TextIO, at_once: int) -> None:
    async def work() -> None:
        for row in rows:  # All workers take from one iterator.
            response = await ask(client, row["url"], row["body"])
            answer = {"status_code": response.status_code, "body": response.json()}
            out.write(json.dumps({"custom_id": row["custom_id"], "response": answer, "error": None}) + "\n")
            out.flush()

    await asyncio.gather(*(work() for _ in range(at_once)))


async def ask(client: AsyncOpenAI, url: str, body: dict[str, Any]) -> httpx.Response:
    """Returns an answer or a refusal. Raises OpenAIError if a later run should ask again."""
    try:
        return await client.post(url, body=body, cast_to=httpx.Response)
    except APIStatusError as error:
        if error.status_code in (400, 404, 422):
            return error.response
        raise


if __name__ == "__main__":
    main()
