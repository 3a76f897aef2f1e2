"""What a constraint costs where the model agrees with it by itself: steps, and the same bits.

    .venv/bin/python -m benchmarks.held_against_free [--prompts 60] [--file FILE.jsonl]

Each prompt is answered freely, and then under a grammar that the free answer matches: any JSON
object where the answer is one, else a choice of several texts, of which the answer is one. --file
has other prompts, a JSON text on each line; without it they are questions that the embedded model
was trained on. Where no step was guided and no canvas repaired, tokens and steps have to be those
of the free reply. Prints the counts and one JSON line. Exit code 1 where they are not, or where
constrained replies take over 1.2 times the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sfumato
from sfumato import Engine, EngineConfig, Request
from sfumato.api import Model, Reply
from sfumato.diffusion.constraints.grammar_source import GrammarSource, choice_source, schema_source
from sfumato.train.questions import all_questions

GOAL = 1.2
OTHERS = ("yes", "no", "I do not know.")


def replies(engine: Engine, requests: Sequence[Request]) -> list[Reply]:
    return [handle.result() for handle in [engine.submit(request) for request in requests]]


def grammar_of(answer: str) -> GrammarSource:
    """What an answer matches."""
    try:
        is_object = isinstance(json.loads(answer), dict)
    except ValueError:
        is_object = False
    if is_object:
        return schema_source({"type": "object"})
    return choice_source([*OTHERS, *({answer} - {*OTHERS})])


def measure(model: Model, prompts: Sequence[str]) -> dict[str, Any]:
    end_thought = model.grammars.no_thought  # what a grammar puts behind a prompt
    requests: list[dict[str, Any]] = [
        {"ids": model.prompt_ids(prompt) + end_thought, "seed": number, "max_tokens": 256}
        for number, prompt in enumerate(prompts)
    ]
    engine = Engine(model, EngineConfig(slots=4, context=1024, queue=len(prompts))).start()
    try:
        free = replies(engine, [Request(**each, retry_empty=False) for each in requests])
        pairs = [
            (each, reply)
            for each, reply in zip(requests, free, strict=True)
            if reply.stop_reason == "eos" and reply.text
        ]
        held = replies(
            engine, [Request(**each, grammar=grammar_of(reply.text)) for each, reply in pairs]
        )
    finally:
        engine.close()
    counts = {"prompts": len(pairs), "json": 0, "unbroken": 0, "differ": 0, "free_steps": 0}
    counts |= {"held_steps": 0, "same_text": 0}
    for (_, alone), reply in zip(pairs, held, strict=True):
        report = reply.stats.constraint
        assert report is not None
        counts["json"] += grammar_of(alone.text).kind == "schema"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=60, help="at most (%(default)s)")
    parser.add_argument("--file", type=Path, help="prompts, a JSON text on each line")
    options = parser.parse_args()
    if options.file:
        prompts = [json.loads(line) for line in options.file.read_text().splitlines()]
    else:
        prompts = [question.text for question in all_questions()]
    stride = max(1, len(prompts) // options.prompts)
    figures = measure(sfumato.load(), prompts[::stride][: options.prompts])
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    print(json.dumps({"benchmark": "held_against_free", **figures}))
    return 0 if not figures["differ"] and figures["ratio"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
