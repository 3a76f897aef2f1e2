"""What a constraint costs where the model agrees with it by itself: steps, and the same bits.

    .venv/bin/python -m benchmarks.held_against_free [--prompts 60] [--questions]

Each prompt is answered freely, and then under a grammar that the free answer matches. The prompts
ask for JSON objects of the kinds that the embedded model was trained on: the grammar is the task's
schema where the free answer is its object, any object where it is another one, and a prompt whose
answer is none is left out. --questions: questions instead, under a choice of several texts. Where
no step was guided and no canvas repaired, tokens and steps have to be those of the free reply.
Prints the counts and one JSON line. Exit code 1 where they are not, or where constrained replies
take over 1.2 times the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import sfumato
from sfumato import Engine, EngineConfig, Request
from sfumato.api import Model, Reply
from sfumato.diffusion.constraints.grammar import GrammarSource, choice_source, schema_source
from sfumato.embedded_questions import all_questions
from sfumato.train.canvas_data import JsonTask, draw_json

GOAL = 1.2
OTHERS = ("yes", "no", "I do not know.")


def replies(engine: Engine, requests: Sequence[Request]) -> list[Reply]:
    return [handle.result() for handle in [engine.submit(request) for request in requests]]


def grammar_of(task: JsonTask | None, answer: str) -> GrammarSource | None:
    """What an answer matches; None: an answer that is no object, where one is asked for."""
    if task is None:
        return choice_source([*OTHERS, *({answer} - {*OTHERS})])
    try:
        value = json.loads(answer)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    return schema_source(task.schema if value == task.value else {"type": "object"})


def measure(model: Model, prompts: dict[str, JsonTask | None]) -> dict[str, Any]:
    """prompts: with the tasks that they are, None for a question."""
    end_thought = model.fills.empty_thought  # what a grammar puts behind a prompt
    requests: list[dict[str, Any]] = [
        {"ids": model.prompt_ids(prompt) + end_thought, "seed": number, "max_tokens": 256}
        for number, prompt in enumerate(prompts)
    ]
    engine = Engine(model, EngineConfig(slots=4, context=1024, queue=len(prompts))).start()
    try:
        free = replies(engine, [Request(**each, retry_empty=False) for each in requests])
        pairs = []
        for each, task, reply in zip(requests, prompts.values(), free, strict=True):
            source = grammar_of(task, reply.text)
            if reply.stop_reason == "eos" and reply.text and source is not None:
                pairs.append((Request(**each, grammar=source), reply))
        held = replies(engine, [request for request, _ in pairs])
    finally:
        engine.close()
    counts = {
        "prompts": len(prompts),
        "compared": len(pairs),
        "unbroken": 0,
        "differ": 0,
        "free_steps": 0,
    }
    counts |= {"held_steps": 0, "same_text": 0}
    for (_, alone), reply in zip(pairs, held, strict=True):
        report = reply.stats.constraint
        assert report is not None
        counts["free_steps"] += sum(alone.stats.steps)
        counts["held_steps"] += sum(reply.stats.steps)
        counts["same_text"] += reply.token_ids == alone.token_ids
        if not (report.steps or report.repairs or report.causal_tokens):
            counts["unbroken"] += 1
            counts["differ"] += (reply.token_ids, reply.stats.steps) != (
                alone.token_ids,
                alone.stats.steps,
            )
    ratio = counts["held_steps"] / max(1, counts["free_steps"])
    return counts | {"ratio": round(ratio, 3)}


def prompts_of(count: int, are_questions: bool) -> dict[str, JsonTask | None]:
    if are_questions:
        texts = [question.text for question in all_questions()]
        return dict.fromkeys(texts[:: max(1, len(texts) // count)][:count])
    rng, tasks = np.random.default_rng(0), dict[str, JsonTask | None]()
    while len(tasks) < count:
        task = draw_json(rng)
        tasks[task.request] = task
    return tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=60, help="at most (%(default)s)")
    parser.add_argument("--questions", action="store_true", help="questions, under a choice")
    options = parser.parse_args()
    figures = measure(sfumato.load(), prompts_of(options.prompts, options.questions))
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps({"benchmark": "held_against_free", **figures}))
    return 0 if not figures["differ"] and figures["ratio"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
