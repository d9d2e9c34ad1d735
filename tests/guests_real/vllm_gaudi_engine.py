"""Engines of an installed vllm-gaudi, one a configuration, and what they do: tables, warm-up, steps of real traffic.

Runs in the environment of the plugin, with the double of the bridge first on PYTHONPATH::

    python vllm_gaudi_engine.py MODEL < configurations.jsonl > seen.jsonl

A configuration is ``{"engine": {arguments of vllm.LLM}, "variables": {...}, "prompts": [[token, ...], ...]}``. Each one
has a fork of this process, which has imported everything. Shapes are what counts: nothing is compiled (TORCHDYNAMO_DISABLE),
and all hidden states are 0.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from typing import Any


def observe(configuration: dict[str, Any], model: str) -> dict[str, Any]:
    """Returns what an engine of `configuration` did: see `main`."""
    os.environ.update(configuration["variables"])
    import torch
    from vllm import LLM, SamplingParams
    from vllm_gaudi.extension import runtime
    from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner

    runtime.clear_config()
    lines: list[str] = []
    logging.getLogger("vllm").addHandler(_Collecting(lines))
    tables: dict[str, Any] = {}
    steps: list[Any] = []
    warm_up = HPUModelRunner.warmup_model

    def observed(runner: Any) -> None:
        runner.debug_fwd = steps.append  # Called with the shape of each step.
        runner.model.forward = lambda input_ids, **_: torch.zeros(
            *input_ids.shape, runner.hidden_size, dtype=runner.dtype, device="hpu"
        )
        warm_up(runner)
        manager = runner.bucketing_manager
        tables.update(
            prompt=list(manager.prompt_buckets), decode=list(manager.decode_buckets), warmed=steps.copy()
        )
        steps.clear()

    HPUModelRunner.warmup_model = observed
    engine = LLM(model=model, skip_tokenizer_init=True, load_format="dummy", **configuration["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in configuration["prompts"]]
    if asked:
        engine.generate(asked, sampling, use_tqdm=False)
    return {**tables, "live": steps, "log": lines}


class _Collecting(logging.Handler):
    """Keeps messages."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def main() -> None:
    """Prints what each engine did: tables (``prompt``, ``decode``), shapes of steps (``warmed``, ``live``), ``log``."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Engines print.
    import vllm  # noqa: F401  Imported once, for all forks.
    import vllm_gaudi.v1.worker.hpu_worker  # noqa: F401

    configurations = [json.loads(line) for line in sys.stdin]
    for configuration in configurations:
        process = os.fork()
        if process == 0:
            try:
                found = observe(configuration, sys.argv[1])
            except BaseException:
                found = {"failed": traceback.format_exc()}
            with os.fdopen(answers, "w", encoding="utf-8") as stream:
                stream.write(json.dumps(found) + "\n")
            os._exit(0)
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
