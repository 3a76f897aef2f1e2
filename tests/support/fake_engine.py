"""An `Engine` without a network: requests get events that were written beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from tests.support.scripted_model import END_IDS, MARKERS, PIECES, TEMPLATE, tokenizer

from sfumato.api import Reply
from sfumato.diffusion.constraints.call_grammar import Source
from sfumato.diffusion.limits import Stats
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.engine import (
    Account,
    Decided,
    DecisionRequest,
    DecisionSink,
    DecisionUsage,
    EngineConfig,
    EngineState,
    Event,
    Failed,
    Finished,
    Handle,
    Health,
    Prompt,
    Request,
    ServedModel,
    Settled,
)
from sfumato.engine.events import Sink
from sfumato.engine.memory.estimate import Prediction
from sfumato.engine.memory.guard import MemoryView
from sfumato.engine.queue.slots import SlotState
from sfumato.engine.request import AnyRequest
from sfumato.engine.stats import History, Speeds, Totals
from sfumato.text.template import ChatTemplate
from sfumato.train.recipe import EMBEDDED

TEXTS = ("Hello ", "there.")


def account(request: Request) -> Account:
    return Account(
        request_id=request.id,
        endpoint=request.endpoint,
        seed=request.seed or 0,
        prompt_tokens=3,
        cached_tokens=0,
        requested_tokens=request.max_tokens,
        output_tokens=2,
        thought_tokens=0,
        canvas_tokens=64,
        steps=(4, 2),
        convergence=("converged", "converged"),
        retries=0,
        queue_s=0.0,
        slot_wait_s=0.0,
        prefill_s=0.1,
        denoise_s=0.2,
        commit_s=0.1,
        first_draft_s=0.1,
        first_commit_s=0.2,
        total_s=0.4,
        slot=0,
        context=512,
        allocated=True,
    )


def reply_events(request: Request, texts: Sequence[str] = TEXTS) -> list[Event]:
    """A canvas for each text, and the end."""
    ids = [[tokenizer().encode(text)[0]] for text in texts]
    settled: list[Event] = [
        Settled(number, text, "", ids[number], "converged") for number, text in enumerate(texts)
    ]
    reply = Reply(
        "".join(texts), None, (), [token for part in ids for token in part], "eos", Stats(3)
    )
    return [*settled, Finished(reply, account(request))]


def decided(request: DecisionRequest) -> Decided:
    """Answers in which the first option is twice as probable as each of the others."""
    answers = {}
    for name, question in request.questions.items():
        count = len(question.options)
        rest = (1 / (count + 1),) * (count - 1)
        likely = 1 - sum(rest), *rest
        causal = None if request.verify is None else likely[::-1]
        answers[name] = question.answer(likely, 0.9, True, causal=causal)
    reads = sum(len(question.options) > 1 for question in request.questions.values())
    how = replace(account(Request(id=request.id)), questions=len(answers), reads=reads)
    return Decided(answers, DecisionUsage(12, 3, reads), how)


class FakeEngine:
    """Answers at once, in the caller's thread. failure: what replies end in after their first
    canvas; served: the model that it says it serves."""

    def __init__(self, failure: Failed | None = None, **served: Any) -> None:
        self.config = EngineConfig(slots=2, context=512)
        self.adapters: dict[str, Any] = {}
        fields: dict[str, Any] = {
            "name": "fake",
            "packaged": None,
            "family": "DiffusionGemma",
            "device": "cpu",
            "config": replace(EMBEDDED, vocab_size=len(PIECES)),
            "tokenizer": tokenizer(),
            "template": ChatTemplate(TEMPLATE, markers=MARKERS),
            "sampler_defaults": REFERENCE,
            "end_ids": END_IDS,
        }
        self.served = ServedModel(**fields | served)
        self.death: str | None = None
        self.requests: list[Request] = []
        self.decisions: list[DecisionRequest] = []
        self.refusal: Exception | None = None  # what `decide` raises
        self._failure = failure

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        self.requests.append(request)
        handle = Handle(request.id, sink, lambda: None)
        events = reply_events(request)
        for event in events if self._failure is None else [events[0], self._failure]:
            handle.deliver(event)
        return handle

    def decide(self, request: DecisionRequest, sink: DecisionSink | None = None) -> Handle:
        self.decisions.append(request)
        if self.refusal is not None:
            raise self.refusal
        handle = Handle(request.id, sink, lambda: None)
        handle.deliver(decided(request) if self._failure is None else self._failure)
        return handle

    def offer(self, request: Request, sink: Sink | None = None) -> Handle | None:
        return self.submit(request, sink)

    def try_grammar(self, source: Source, client: str) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def check(self, request: Request) -> None:
        pass

    def drop(self, request: AnyRequest, terminal: Failed) -> None:
        pass

    def late(self, request: AnyRequest) -> str | None:
        return None

    def refusals(self, request: Request) -> AbstractContextManager[None]:
        return nullcontext()

    def prompt(self, request: Request) -> Prompt:
        return Prompt([5, 6, 7], (3,))

    def check_length(self, text: str, field: str) -> None:
        pass

    def now(self) -> float:
        return 0.0

    def health(self) -> Health:
        return Health(self.death is None, self.death, 1.0, 0, 0)

    def state(self) -> EngineState:
        return EngineState(
            0,
            (),
            tuple(SlotState(i, 512, False, 0, False, None) for i in range(2)),
            Totals(Counter()),
            Speeds(0.0, 0.0, 0.0, 0.0, 0.0),
            History(5.0, (), ()),
            0,
            0,
            MemoryView(Prediction(100, 50, 20, 8, 9, 3, 4), None, None),
            False,
        )

    def used_memory(self) -> int | None:
        return 123

    def reset_prefix_cache(self) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(2)
        return done
