"""What a reply under a grammar costs the reply beside it.

    .venv/bin/python -m benchmarks.neighbour_step [--steps 32] [--rounds 4] [--vocabulary FILE]

Two engines of the embedded model, or, where --vocabulary names a GGUF file with the published
checkpoint's vocabulary, of a tiny random model with that, which has next to no network and so shows
the grammar's share at its largest. In each engine a plain reply is denoised beside another one: a
plain one, one that a JSON schema guides, or one whose canvas has two steps, so that it is soon
repaired and then written token by token. Their steps are taken by turns, each one timed (CPU time
of one thread; on a device, wall time) until the companion ends. Prints the medians and the longest
steps, the ratio of medians, how many of the companion's steps the grammar guided, what was repaired
and written, and one JSON line. Exit code 1 where the plain reply's text is another, or where the
ratio beside a guided reply is over 1.05.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from benchmarks.schemas import real_vocabulary

import sfumato
from sfumato import Engine, EngineConfig, Request, SamplerConfig
from sfumato.api import Model
from sfumato.diffusion.constraints.grammar import GrammarSource, schema_source
from sfumato.diffusion.sampler import Never
from sfumato.engine import Handle

GOAL = 1.05
WARM = 3  # steps at the beginning, which encode the prompts and make what is made once
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "tags"],
}
LONG = {"type": "array", "items": SCHEMA | {"additionalProperties": False}, "minItems": 8}
WRITTEN_AFTER = 2  # steps of a canvas


class Pair:
    """An engine with a plain reply and its companion."""

    def __init__(
        self,
        model: Model,
        steps: int,
        grammar: GrammarSource | None,
        seed: int,
        companion_steps: int | None = None,
    ) -> None:
        """companion_steps: of each canvas of the companion; as many as the plain reply's unless
        given."""
        self.engine = Engine(model, EngineConfig(slots=2, context=512))
        # One canvas, which never settles by itself.
        sampler = SamplerConfig(max_steps=steps, stopping=Never())
        beside = SamplerConfig(max_steps=companion_steps or steps, stopping=Never())
        length = model.config.canvas_length
        self.plain, self.companion = (
            self._submit(Request("Who are you?", seed=seed, sampler=sampler, max_tokens=length)),
            self._submit(
                Request("name a color", seed=1, sampler=beside, max_tokens=length, grammar=grammar)
            ),
        )

    def _submit(self, request: Request) -> Handle:
        return self.engine.submit(request)

    def step(self) -> float:
        """Seconds of one step."""
        clock = time.process_time if self.engine.served.device == "cpu" else time.perf_counter
        began = clock()
        self.engine.step()
        return clock() - began

    def end(self) -> list[int]:
        """The plain reply's tokens, once both replies have ended."""
        while self.plain.terminal is None or self.companion.terminal is None:
            self.engine.step()
        self.engine.close()
        return self.plain.result().token_ids


def measure(model: Model, steps: int, rounds: int) -> dict[str, float | int | bool]:
    """All rounds, each with another seed of the plain reply."""
    seconds: tuple[list[float], list[float], list[float]] = [], [], []
    is_same, guided, denoised, repairs, written = True, 0, 0, 0, 0
    for seed in range(rounds):
        pairs = [
            Pair(model, steps, None, seed),
            Pair(model, steps, schema_source(SCHEMA), seed),
            Pair(model, steps, schema_source(LONG), seed, WRITTEN_AFTER),
        ]
        for number in range(steps):
            for pair, times in zip(pairs, seconds, strict=True):
                if pair.companion.terminal is not None:
                    continue
                elapsed = pair.step()
                if number >= WARM:
                    times.append(elapsed)
        texts = [pair.end() for pair in pairs]
        is_same &= all(text == texts[0] for text in texts)
        stats, late = (pair.companion.result().stats for pair in pairs[1:])
        assert stats.constraint is not None and late.constraint is not None
        guided, denoised = guided + stats.constraint.steps, denoised + sum(stats.steps)
        repairs += late.constraint.repairs
        written += late.constraint.causal_tokens
    plain, beside, writing = (statistics.median(times) for times in seconds)
    longest = [round(max(times) * 1e3, 3) for times in seconds]
    return {
        "plain_ms": round(plain * 1e3, 3),
        "plain_max_ms": longest[0],
        "beside_grammar_ms": round(beside * 1e3, 3),
        "beside_grammar_max_ms": longest[1],
        "beside_writing_ms": round(writing * 1e3, 3),
        "beside_writing_max_ms": longest[2],
        "ratio": round(beside / plain, 3),
        "same_text": is_same,
        "guided_steps": guided,
        "companion_steps": denoised,
        "repairs": repairs,
        "written_tokens": written,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=32, help="of a canvas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--vocabulary", type=Path, help="a GGUF file with a real vocabulary")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = real_vocabulary(options.vocabulary) if options.vocabulary else sfumato.load()
    figures = measure(model, options.steps, options.rounds)
    print(
        f"a step beside a plain row {figures['plain_ms']} ms (longest {figures['plain_max_ms']}), "
        f"beside a row with a grammar {figures['beside_grammar_ms']} ms (longest "
        f"{figures['beside_grammar_max_ms']}): {figures['ratio']} times; the same text: "
        f"{figures['same_text']}; {figures['guided_steps']} of the companion's "
        f"{figures['companion_steps']} steps were guided; beside a row that is repaired "
        f"({figures['repairs']} times in all) and written ({figures['written_tokens']} tokens) "
        f"{figures['beside_writing_ms']} ms (longest {figures['beside_writing_max_ms']})"
    )
    print(json.dumps({"benchmark": "neighbour_step", "steps": options.steps, **figures}))
    return 0 if figures["same_text"] and figures["ratio"] <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
