"""A server of a model that answers "a" every 20 ms: ``python -m tests.unit.server.slow_server DELAY DRAIN``.

It prints its port once it listens. From then on it cannot start a thread, as if the system had none left.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from aotgaudi.bucketing.lookup import BucketTable
from aotgaudi.engine.admission import Admission, RequestRules
from aotgaudi.engine.blocks import BlockPool
from aotgaudi.engine.core import EngineCore
from aotgaudi.engine.detokenizer import IncrementalDetokenizer
from aotgaudi.engine.loop import Engine, NewDetokenizer
from aotgaudi.engine.output import Event, OnEvent
from aotgaudi.engine.request import NewRequest
from aotgaudi.engine.scheduler import Scheduler
from aotgaudi.engine.steps import DefragStep, Step, StepResult
from aotgaudi.entries import DecodeEntry, PromptEntry
from aotgaudi.llm.running import Warmth
from aotgaudi.server.app import create_app
from aotgaudi.server.log import log_handler
from aotgaudi.server.options import StopTimes
from aotgaudi.server.run_and_drain import HttpServer, bind
from aotgaudi.server.service import Service
from aotgaudi.spec.limits import ServingLimits
from tests.unit.server.conftest import DirectPreprocessor, make_preparer

LIMITS = ServingLimits(
    max_num_seqs=2, max_num_batched_tokens=64, max_model_len=100_000, block_size=100, num_blocks=2000
)


class _Runner:
    def run(self, step: Step) -> StepResult:
        time.sleep(0.02)
        return StepResult([None if row.sampling is None else 64 for row in step.rows])

    def exchange(self, step: DefragStep) -> None:
        raise NotImplementedError

    def clear(self, blocks: Sequence[int]) -> None:
        raise NotImplementedError


class EngineOnThread(Engine):
    """Admits requests, and tells of their events on the event loop, as a client of an engine's process does."""

    def __init__(self, core: EngineCore, rules: RequestRules, new_detokenizer: NewDetokenizer) -> None:
        super().__init__(core, new_detokenizer)
        self.admission = Admission(rules)

    def add(self, requests: Sequence[NewRequest], on_event: OnEvent, **others: Any) -> None:
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            loop.call_soon_threadsafe(on_event, event)

        super().add(self.admission.rules.resolve(requests), tell, **others)

    async def refresh(self) -> None:
        pass


def _refuse_threads(event: str, _arguments: object) -> None:
    if event == "_thread.start_new_thread":
        raise RuntimeError("can't start new thread")


def main(delay: float, drain: float) -> None:
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(sys.stderr)])
    table = BucketTable((PromptEntry(1, 64, 1000),), (DecodeEntry(2, 1, 2000),))
    preparer = make_preparer(None, LIMITS.max_model_len)
    tokenizer = preparer.tokenizer
    engine = EngineOnThread(
        EngineCore(Scheduler(LIMITS, table, BlockPool(LIMITS.num_blocks)), _Runner()),
        RequestRules(LIMITS, vocab_size=258),
        lambda new: IncrementalDetokenizer(tokenizer.decode, new.prompt_token_ids),
    )
    engine.start()
    service = Service(
        engine=engine,
        preprocessor=DirectPreprocessor(preparer),
        model=preparer.model,
        manifest_id="0",
        warmth=lambda: Warmth(1, 1, {}),
        version="0",
    )

    def on_listening(url: str) -> None:
        sys.addaudithook(_refuse_threads)
        print(url.rpartition(":")[2], flush=True)

    HttpServer(
        create_app(service),
        bind("127.0.0.1", 0),
        service,
        on_listening=on_listening,
        stop_times=StopTimes(delay=delay, drain=drain, flush=1),
    ).run_until_stopped()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
