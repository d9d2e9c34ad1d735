"""Files of flags, ``--config FILE``: vLLM's own parser makes of the kept command what it makes of our plain one."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from aotgaudi.errors import SpecError
from aotgaudi.from_vllm.command import VllmCommand
from aotgaudi.wrap.starts import plain_command

pytestmark = pytest.mark.guests

JUDGE = """
import argparse, json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser

def flags(parser):
    parser.add_argument("model_tag", nargs="?")
    for name in ("--model", "--config", "--port", "--max-num-seqs", "--dtype", "--speculative-config"):
        parser.add_argument(name)
    for name in ("--served-model-name", "--lora-modules"):
        parser.add_argument(name, nargs="+")
    for name in ("--enforce-eager", "--enable-prefix-caching"):
        parser.add_argument(name, action=argparse.BooleanOptionalAction)
    parser.add_argument("--disable-log-stats", action="store_true")
    return parser

def read(words):
    parser = FlexibleArgumentParser()
    if words[:1] == ["serve"]:
        flags(parser.add_subparsers(dest="command").add_parser("serve"))
    else:
        flags(parser)
    try:
        found = vars(parser.parse_args(words))
    except (Exception, SystemExit) as error:
        return None
    word = found.pop("model_tag")
    found["model"] = (word if words[:1] == ["serve"] else None) or found["model"]
    return {name: value for name, value in found.items() if name != "config"}

print(json.dumps([read(words) for words in json.load(sys.stdin)]))
"""
VALUES: dict[str, list[Any]] = {
    "model": ["org/file", "/models/file"],
    "port": [8123, "8124", 0, None],
    "max-num-seqs": [4, "4", 1_000, 0o17, 1.5e3],
    "max_num_seqs": [5],
    "dtype": ["auto", "bfloat16", ""],
    "speculative-config": [{"model": "m", "n": 3, "on": True, "rate": 0.5, "no": None}, '{"n": 3}'],
    "served-model-name": ["one", ["a", "b"], [], ["x y", 3]],
    "lora_modules": [["a=b", "c=d"], [{"name": "a"}]],
    "enforce-eager": [True, False],
    "enforce_eager": [True, False],
    "enable-prefix-caching": [True, False],
    "no-enable-prefix-caching": [True],
    "disable-log-stats": [True, False],
}
MODELS = [[], ["org/m"], ["--model", "org/m"], ["--model=org/m"]]
MORE = [
    ["--port", "9"],
    ["--max_num_seqs=7"],
    ["--served-model-name", "z"],
    ["--no-enforce-eager"],
    ["--dtype", "half"],
]


def commands(folder: Path, count: int) -> Iterator[list[str]]:
    """Random commands with a file of flags, the model before it, after it, in it, or nowhere."""
    chosen = random.Random(32)
    for index in range(count):
        keys = chosen.sample(list(VALUES), chosen.randint(0, 6))
        path = folder / f"{index}.yaml"
        path.write_text(yaml.safe_dump({key: chosen.choice(VALUES[key]) for key in keys}, sort_keys=False))
        parts = [["--config", str(path)], *chosen.sample(MORE, chosen.randint(0, 3))]
        model = chosen.choice(MODELS)
        if chosen.random() < 0.5:
            chosen.shuffle(parts)
        parts.insert(chosen.choice([0, 0, len(parts)]), model)
        start = chosen.choice([["vllm", "serve"], ["python", "-m", "vllm.entrypoints.openai.api_server"]])
        yield [*start, *(word for part in parts for word in part)]


def after(words: list[str]) -> list[str]:
    return words[1:] if words[0] == "vllm" else words[3:]


def judged(commands: Sequence[list[str]]) -> list[Any]:
    """What vLLM's parser reads in each command; None if it refuses it."""
    asked = json.dumps([after(words) for words in commands])
    python = os.environ["AOTGAUDI_GUEST_PYTHON"]
    done = subprocess.run(
        [python, "-c", JUDGE], input=asked, capture_output=True, text=True, check=True, timeout=600
    )
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_model_is_that_of_vllm_or_the_command_is_refused() -> None:
    starts = (["vllm", "serve"], ["python", "-m", "vllm.entrypoints.openai.api_server"])
    pieces = (["a"], ["b"], ["--model", "c"], ["--model=d"], ["--port", "1"])
    orders = [order for count in range(4) for order in permutations(pieces, count)]
    commands = [[*start, *chain.from_iterable(order)] for start in starts for order in orders]

    for words, theirs in zip(commands, judged(commands), strict=True):
        try:
            ours = VllmCommand.of(words).model
        except SpecError:
            named = [word for word in after(words) if word in ("a", "b") or word.startswith("--model")]
            assert theirs is None or len(named) != 1 or named[0] in ("a", "b"), words
        else:
            assert ours == theirs["model"], words


def test_vllm_reads_the_plain_command_as_it_reads_the_kept_one(tmp_path: Path) -> None:
    kept, plain = [], []
    for words in commands(tmp_path, 600):
        kept.append(words)
        try:
            plain.append([*plain_command(words, {}, tmp_path).words])
        except SpecError:
            plain.append([*words[:2], "--refused"])
    read = judged([*kept, *plain])
    theirs, ours = read[: len(kept)], read[len(kept) :]
    differ = [
        (words, mine, their, our)
        for words, mine, their, our in zip(kept, plain, theirs, ours, strict=True)
        if their != our
    ]
    assert differ == []
    assert len([one for one in theirs if one is not None]) > 300
