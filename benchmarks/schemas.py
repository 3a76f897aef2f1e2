"""Many JSON schemas: every reply that ends with `stop` must match its schema.

    .venv/bin/python -m benchmarks.schemas [--suite FOLDER] [--vocabulary FILE] [--out FILE.jsonl]

200 bounded schemas drawn at random, with 3 seeds each, and, where --suite names a copy of the
public JSON-Schema-Test-Suite, its first 100 draft-2020-12 schemas that compile; on both embedded
models, on a tiny random model, and, where --vocabulary names a GGUF file with the published
checkpoint's vocabulary, on a tiny random model with that. Random models write nonsense: what they
say is the constraint's work alone. A reply is checked with jsonschema-rs, multiples in decimals.

Each run is appended to --out as it ends; a second call leaves out the runs that stand there. Prints
a table, the refusals of the suite by keyword, and one JSON line. Exit code 1 where a `stop` does
not match, or where fewer than 95 % of the bounded runs end with `stop`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.random_model import random_model
from tests.support.random_schemas import is_valid, random_schema

import sfumato
from sfumato import Engine, EngineConfig, Request
from sfumato.api import Model
from sfumato.diffusion.constraints.grammar import schema_source
from sfumato.diffusion.sampler_config import REFERENCE
from sfumato.engine import Handle, RequestFailed
from sfumato.text.tokenizer import Tokenizer
from sfumato.weights.files.gguf import read_gguf

QUICK = replace(REFERENCE, max_steps=2)  # more steps of a random model are more of the same
BOUNDED_TOKENS, SUITE_TOKENS = 1024, 192
GOAL = 0.95
OUTCOMES = ("stop", "length", "looser", "invalid", "failed", "refused")
AT_ONCE = 8  # replies; the engine gives each the text that it has alone
Key = tuple[str, str, int]  # model, schema, seed
_KEYWORD = re.compile(r"^schema: (.*) (?:is|are) not supported")


@dataclass(frozen=True)
class Run:
    """One reply."""

    model: str
    schema: str
    seed: int
    outcome: str  # one of OUTCOMES; invalid: a stop that does not match; looser: one whose warnings
    # say what of the schema is not held
    why: str = ""  # of a refusal or failure its message; the text of an invalid reply
    tokens: int = 0
    steps: int = 0
    repairs: int = 0
    causal_tokens: int = 0
    closing_tokens: int = 0

    @property
    def key(self) -> Key:
        return self.model, self.schema, self.seed


def finished(key: Key, schema: Any, handle: Handle) -> Run:
    """The run of a request that has been submitted."""
    try:
        reply = handle.result()
    except RequestFailed as error:
        return Run(*key, "failed", str(error))
    outcome, why = ("stop", "") if reply.stop_reason == "eos" else ("length", "")
    if outcome == "stop" and not matches(schema, reply.text):
        is_said = any(line.startswith("schema: ") for line in reply.warnings)
        outcome, why = "looser" if is_said else "invalid", reply.text
    report = reply.stats.constraint
    assert report is not None
    return Run(
        *key,
        outcome,
        why,
        len(reply.token_ids),
        sum(reply.stats.steps),
        report.repairs,
        report.causal_tokens,
        report.closing_tokens,
    )


def matches(schema: Any, text: str) -> bool:
    try:
        return is_valid(schema, text)
    except ValueError:
        return False


def models(vocabulary: Path | None) -> Iterator[tuple[str, Callable[[], Model]]]:
    """The smallest first."""
    yield "random", lambda: random_model(defaults=QUICK)
    yield "embedded", sfumato.load
    yield "masks", lambda: sfumato.load("embedded-masks")
    if vocabulary is not None:
        yield "real vocabulary", lambda: real_vocabulary(vocabulary)


def real_vocabulary(path: Path) -> Model:
    """A tiny random network over 262,144 tokens."""
    text = Tokenizer.from_gguf(read_gguf(path).metadata)
    return random_model(16, text=text, defaults=QUICK, end_ids=(1, 106))


def suite(folder: Path) -> Iterator[tuple[str, Any]]:
    """The schemas of the public suite for draft 2020-12, with their names."""
    paths = sorted((folder / "tests" / "draft2020-12").glob("*.json"))
    if not paths:
        raise SystemExit(f"--suite: {folder} has no tests/draft2020-12/*.json")
    for path in paths:
        for number, group in enumerate(json.loads(path.read_text())):
            yield f"{path.stem}/{number}", group["schema"]


class Results:
    """The runs so far, in a file too."""

    def __init__(self, path: Path | None) -> None:
        self.runs: dict[Key, Run] = {}
        self._file = None
        if path is not None:
            for line in path.read_text().splitlines() if path.exists() else ():
                run = Run(**json.loads(line))
                self.runs[run.key] = run
            self._file = path.open("a")

    def add(self, run: Run) -> None:
        self.runs[run.key] = run
        if self._file is not None:
            print(json.dumps(asdict(run)), file=self._file, flush=True)


def run_all(engine: Engine, wanted: Iterable[tuple[Key, Any, int]], results: Results) -> None:
    """Runs what is wanted and not there yet: (key, schema, max_tokens)."""
    under_way: deque[tuple[Key, Any, Handle]] = deque()
    for key, schema, max_tokens in wanted:
        if key in results.runs:
            continue
        try:
            request = Request(
                "x", grammar=schema_source(schema), max_tokens=max_tokens, seed=key[2]
            )
            under_way.append((key, schema, engine.submit(request)))
        except ValueError as error:
            results.add(Run(*key, "refused", str(error)))
        if len(under_way) == AT_ONCE:
            results.add(finished(*under_way.popleft()))
    while under_way:
        results.add(finished(*under_way.popleft()))


def run_model(
    name: str, model: Callable[[], Model], results: Results, options: argparse.Namespace
) -> tuple[list[Run], list[Run]]:
    """The runs of the bounded schemas, and those of the suite up to the last that counts."""
    bounded = [
        ((name, f"bounded/{number}", seed), random_schema(number), BOUNDED_TOKENS)
        for seed in range(options.seeds)
        for number in range(options.schemas)
    ]
    public = [
        ((name, label, 0), schema, SUITE_TOKENS)
        for label, schema in (suite(options.suite) if options.suite else ())
    ]
    engine = Engine(model(), EngineConfig(slots=AT_ONCE, context=2048)).start()
    try:
        run_all(engine, bounded, results)
        while public:
            runs = [results.runs[key] for key, _, _ in public if key in results.runs]
            compiled = sum(run.outcome != "refused" for run in runs)
            if compiled >= options.compiled or len(runs) == len(public):
                break
            run_all(engine, public[: len(runs) + options.compiled - compiled], results)
    finally:
        engine.close()
    return [results.runs[key] for key, _, _ in bounded], [
        results.runs[key] for key, _, _ in public if key in results.runs
    ]


def keyword(why: str) -> str:
    """What a refusal is counted by: the keyword that is not supported, or its message."""
    named = _KEYWORD.match(why)
    return named[1] if named else why.removeprefix("schema: ")[:60]


def row(name: str, kind: str, runs: list[Run]) -> dict[str, Any]:
    """The figures of some runs."""
    counts = Counter(run.outcome for run in runs)
    sums = {
        field: sum(getattr(run, field) for run in runs)
        for field in ("tokens", "steps", "repairs", "causal_tokens", "closing_tokens")
    }
    return {
        "model": name,
        "schemas": kind,
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        **sums,
    }


def failures(rows: list[dict[str, Any]]) -> Iterator[str]:
    for each in rows:
        where = f"{each['model']}, {each['schemas']}"
        for outcome in ("invalid", "failed"):
            if each[outcome]:
                yield f"{where}: {each[outcome]} replies are {outcome}"
        ended = sum(each[outcome] for outcome in OUTCOMES) - each["refused"]
        if each["schemas"] == "bounded" and each["stop"] < GOAL * ended:
            yield f"{where}: {each['stop']} of {ended} ended with stop, fewer than {GOAL:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schemas", type=int, default=200, help="bounded ones (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of each (%(default)s)")
    parser.add_argument("--suite", type=Path, help="a copy of the JSON-Schema-Test-Suite")
    parser.add_argument(
        "--compiled", type=int, default=100, help="schemas of the suite (%(default)s)"
    )
    parser.add_argument("--vocabulary", type=Path, help="a GGUF file with a real vocabulary")
    parser.add_argument("--models", nargs="*", help="names of models; default: all")
    parser.add_argument("--out", type=Path, help="where each run is written, and read again")
    options = parser.parse_args()
    results, rows, refused = Results(options.out), [], Counter[str]()
    for name, model in models(options.vocabulary):
        if options.models and name not in options.models:
            continue
        bounded, public = run_model(name, model, results, options)
        rows.append(row(name, "bounded", bounded))
        if public:
            rows.append(row(name, "draft 2020-12", public))
            # The same of every model, but for the texts that a small vocabulary cannot write.
            refused |= Counter(keyword(run.why) for run in public if run.outcome == "refused")
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), file=sys.stderr)
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for each in rows:
        print("| " + " | ".join(map(str, each.values())) + " |")
    for why, count in refused.most_common():
        print(f"refused: {count:3}  {why}")
    wrong = list(failures(rows))
    for line in wrong:
        print(f"FAILS: {line}")
    print(json.dumps({"benchmark": "schemas", "rows": rows, "refused": dict(refused)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
