"""Compares our graphs of every text family that the installed transformers knows with its models; writes docs/models.md.

``python ci/model_families.py --seconds 300 --output docs/models.md [FAMILY...]``

Each family is a small config: the default one of its class with the sizes below, and what a build does first with a spec is
done with it (`aotgaudi.compile.model_comparison`), in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import textwrap
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aotgaudi.compile.jobs import explained
from aotgaudi.compile.model_comparison import compare_model
from aotgaudi.errors import AotGaudiError, ModelDiffersError
from aotgaudi.graphs.dialect import ATEN
from aotgaudi.spec.model import ModelSpec

ORDER = RIGHT, REFUSED, NOT_TRACED, NO_CONFIG = "right", "refused", "not traced", "no small config"

SAID = {
    "its graphs are not what transformers": "its graphs are not what transformers computes",
    "keeps more than attention's keys and values": "keeps more than keys and values: a state, or an indexer's keys",
    "attention keyword ": "attention takes a keyword that is not supported",
    "does not attend through transformers": "does not attend through transformers' AttentionInterface",
    "do not fit the KV cache": "keys and values of the layers do not fit one KV cache",
    "has layers that differ in ": "has layers that differ in heads or head size",
    "chooses among attention classes": "chooses among attention classes of its own",
    "attends more often than its config has layers": "attends more often than its config has layers",
    "does not hand the keywords of a call on": "does not hand the keywords of a call on to its attention",
    "builds its own attention mask": "builds its own attention mask",
    "is not supported": "is not supported, by its layer types",
    "does not export": "does not export",
    "is not a torch operator": "calls what is not a torch operator",
    "took more than ": "took too long",
    "Error: ": "transformers refuses the small config, or fails with it",
}
"""A phrase of the words with which a family is refused, and what the page says of it. The first that is there counts."""

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 20,
    "attention_chunk_size": 24,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
"""What a config has of these. Latent attention has as many KV heads as heads, and rotates `qk_rope_head_dim`."""

OPTIONAL = frozenset({"sliding_window", "attention_chunk_size", "q_lora_rank", "kv_lora_rank"})
"""What stays without a value where a family's default has none."""


def config_of(family: str) -> dict[str, Any]:
    """Returns a small config.json of a family."""
    kind = CONFIG_MAPPING[family]
    own = kind().get_text_config().to_dict()
    sizes = {
        name: value
        for name, value in SIZES.items()
        if own.get(name) is not None or (name in own and name not in OPTIONAL)
    }
    if "kv_lora_rank" in sizes:
        sizes |= {"num_key_value_heads": 4, "head_dim": 8}
    if "text_config" in kind().to_dict():
        sizes = {"text_config": sizes}
    config = kind(**sizes)
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": family}


def examine(family: str, channel: Connection) -> None:
    """Sends what became of a family, in words."""
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        config = config_of(family)
    except Exception as error:
        channel.send((NO_CONFIG, f"{type(error).__name__}: {one_line(error)}", 0.0))
        return
    try:
        found = compare_model(ModelSpec(name=family, dtype="float32", config=config), ATEN)
        result = RIGHT, "; ".join(dict.fromkeys(found.layers))
    except ModelDiffersError as error:
        result = REFUSED, str(error)
    except Exception as error:
        said = explained(error, family) or error
        kind = "" if isinstance(said, AotGaudiError) else f"{type(said).__name__}: "
        result = NOT_TRACED, kind + one_line(said)
    channel.send((*result, time.monotonic() - started))


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def result_of(family: str, seconds: float) -> tuple[str, str, float]:
    """Returns what became of a family, and in how many seconds."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=examine, args=(family, sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            found: tuple[str, str, float] = receiver.recv()
            return found
        return NOT_TRACED, f"took more than {seconds:.0f} seconds", seconds
    except EOFError:
        return NOT_TRACED, "its process died", 0.0
    finally:
        process.kill()
        process.join()


def grouped(rows: dict[str, tuple[str, str, float]]) -> dict[tuple[str, str], list[str]]:
    """Returns the families that are not right, by what became of them and why, in the words of SAID where it has some."""
    groups: dict[tuple[str, str], list[str]] = {}
    for family, (what, words, _) in rows.items():
        if what != RIGHT:
            said = " ".join(words.split()).replace("|", "/")
            why = next((short for phrase, short in SAID.items() if phrase in said), said)
            groups.setdefault((what, why), []).append(family)
    return groups


def page(rows: dict[str, tuple[str, str, float]]) -> str:
    """Returns the page: the families that are right in a line, and the others with the words that they are refused with."""
    left = ", ".join(f"`{family}`" for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family not in rows)
    right = ", ".join(f"`{family}`" for family, (what, _, _) in rows.items() if what == RIGHT)
    counts = Counter(what for what, _, _ in rows.values())
    lines = [
        "# Which families of models are computed right",
        "",
        "A build compares the graphs of a model with transformers' own model before it compiles the first unit. This page",
        "has the result for a small config of every family that has a causal language model in transformers",
        f"{transformers.__version__} (torch {torch.__version__}): "
        + ", ".join(
            f"{counts[what]} {what}" for what in (RIGHT, REFUSED, NOT_TRACED, NO_CONFIG) if counts[what]
        )
        + ".",
        "`no small config` means that the script found none that transformers takes. A family's other configs may differ",
        "from its default one; each build compares its own.",
        "",
        "Made by `python ci/model_families.py --output docs/models.md`.",
        *(["", *textwrap.wrap(f"Not examined: {left}.", 118, break_on_hyphens=False)] if left else []),
        "",
        "## Right",
        "",
        *textwrap.wrap(right + ".", 118, break_on_hyphens=False),
        "",
        "## Others",
        "",
        "| | what a build says | families |",
        "|---|---|---|",
        *(
            f"| {what} | {words} | {', '.join(f'`{family}`' for family in families)} |"
            for (what, words), families in sorted(
                grouped(rows).items(), key=lambda row: (ORDER.index(row[0][0]), -len(row[1]), row[0])
            )
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Examines the families, prints each as it comes, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--seconds", type=float, default=300.0, help="the most for a family")
    parser.add_argument(
        "--rows", type=Path, help="keeps the results; families that it has are not examined again"
    )
    parser.add_argument("--output", type=Path, help="the page")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    known = args.rows.read_text().splitlines() if args.rows and args.rows.exists() else []
    rows = {family: tuple(rest) for family, *rest in map(json.loads, known)}
    for family in args.families or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family not in rows:
            rows[family] = result_of(family, args.seconds)
            print(family, *rows[family], sep="\t", flush=True)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write(json.dumps([family, *rows[family]]) + "\n")
    if args.output:
        args.output.write_text(page(dict(sorted(rows.items()))))


if __name__ == "__main__":
    main()
