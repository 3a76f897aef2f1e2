"""Every command and every HTTP route on one checkpoint, and the memory that they take beside what
is predicted: whether a model of real sizes runs, not what it says.

    .venv/bin/python benchmarks/random_checkpoint.py /tmp/x.gguf --preset qwen3-0.6b --format q8_0
    PYTHONPATH=src .venv/bin/python benchmarks/every_route.py /tmp/x.gguf

Commands run one after another, each in a process of its own with an answer of a few tokens; routes,
those of the API description, are asked of one `sfumato serve` of two slots, which then fills both
to the brim at once. A command or a route that is not in the tables below fails. Memory is anonymous
memory at its peak, looked at every few milliseconds, over a process that has imported all and read
the vocabulary; Linux alone has it. Predicted: of a command what `sfumato inspect` says of its
context, of the server what /memory says, with the snapshots that it holds and no reads. Prints a
table and one JSON line; exit code 1 where something does not answer as it should, or its memory is
over 10 % away from the prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from sfumato.api import load_text
from sfumato.bench import environment
from sfumato.bench.environment import PeakMemory, commit, cpu_name
from sfumato.cli.arguments import COMMANDS
from sfumato.cli.terminal import table
from sfumato.engine.memory.estimate import ModelFootprint
from sfumato.model.families import family_of, open_checkpoint
from sfumato.model.loading import config_of
from sfumato.model.placement import pick_dtype

TOKENS = 6  # of an answer
LONG = 216  # of a question that nearly fills the slot of the commands
SLOTS, CONTEXT = 2, 1024
PATIENCE_S = 1200.0
MOST_DEVIATION = 0.1  # of the memory from the prediction; -6.7 % is the most that was measured
WORKS, REFUSED = (0,), (2,)

# A bare process: what a command or the server has before the model, its vocabulary included.
BARE = """
import sys
import sfumato.api, sfumato.engine, sfumato.cli.run
if sys.argv[2] == "serve":
    import sfumato.server.app, sfumato.cli.serve
from sfumato.api import load_text
from sfumato.bench.environment import resident
from sfumato.model.families import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
text = load_text(checkpoint)
print(resident()["peak_anonymous"])
"""

QUESTIONS = """
[questions.good]
type = "yes/no"
instructions = "Good?"
"""
LABELLED = "text,good\n" + "".join(f"row {n},{'yes' if n % 2 else 'no'}\n" for n in range(32))
TALK = (
    {
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "every_route", "version": "1"},
        },
    },
    {"method": "notifications/initialized"},
    {"method": "tools/list"},
    {
        "method": "tools/call",
        "params": {"name": "generate", "arguments": {"prompt": "Hi", "max_tokens": TOKENS}},
    },
)


def spoken() -> str:
    """What an MCP client writes: the calls with their numbers, a line each."""
    lines = []
    for number, call in enumerate(TALK, 1):
        asks = {} if call["method"].startswith("notifications/") else {"id": number}
        lines.append(json.dumps({"jsonrpc": "2.0", **asks, **call}))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Run:
    """A run of a command. argv: {m} is the checkpoint, {q} a question of LONG tokens; says: what
    its output has to contain; loads: whether it loads the checkpoint, so that its memory is
    measured; context: positions of its one slot, None for an engine of several, of which `inspect`
    says nothing."""

    argv: tuple[str, ...]
    codes: tuple[int, ...] = WORKS
    stdin: str = ""
    says: str = ""
    loads: bool = True
    context: int | None = 256


SHORT = ("-m", "{m}", "--max-tokens", str(TOKENS))
RUNS: dict[str, Run] = {
    "run": Run(("run", *SHORT, "{q}")),
    "chat": Run(("chat", *SHORT), stdin="Hi\nAnd then?\n", context=4096),
    "fill": Run(("fill", "-m", "{m}", "--reply-to", "{q}", "It is {{{{1}}}}"), says="It is"),
    "edit": Run(("edit", "text.txt", "-m", "{m}", "Shorter."), says="prediction"),
    "decide": Run(("decide", "-q", "q.toml", "--state", "{q}", "-m", "{m}"), says="good"),
    "calibrate": Run(
        ("calibrate", "-q", "q.toml", "--labelled", "t.csv", "-m", "{m}"), context=None
    ),
    "perplexity": Run(("perplexity", "text.txt", "-m", "{m}"), says="causal", context=2048),
    "mcp": Run(("mcp", "-m", "{m}"), stdin=spoken(), says='"result"', context=None),
    "inspect": Run(("inspect", "{m}"), says="memory predicted", loads=False),
    "convert": Run(("convert", "{m}", "out.gguf", "--to", "q8_0"), says="q8_0", loads=False),
    "doctor": Run(("doctor",), says="memory", loads=False),
    "verify-model": Run(("verify-model", "{m}"), says="all five: sha256"),
    "bench": Run(("bench", *SHORT, "--prompt-tokens", "8", "--repeats", "1", "--warmup", "0")),
    "list": Run(("list",), loads=False),
    "completion": Run(("completion", "bash"), says="sfumato", loads=False),
    "version": Run(("version",), says="sfumato", loads=False),
    "help": Run(("help", "run"), says="usage", loads=False),
    "pull": Run(("pull",), says="sdar-1.7b", loads=False),  # without a name: what is published
    "remove": Run(("remove", "sdar-1.7b"), REFUSED, loads=False),  # it is not here
}
REFUSED_OF_MASKS = ("edit", "perplexity")
NOT_RUN = {
    "serve": "its routes are",
    "demo": "of the embedded model alone",
    "train": "makes a model",
    "eval": "the tasks of the embedded model",
}

USER = [{"role": "user", "content": "Hi"}]
ASKED = {"good": {"type": "noul", "instructions": "Good?"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "top_k": 50, "top_p": 0.9},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/{response_id}/cancel": {},
    "/v1/embeddings": {"input": ["Hi", "And then?"]},
    "/embeddings": {"content": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/v1/chat/completions/input_tokens": {"messages": USER},
    "/completion": {"prompt": "Hi"},
    "/infill": {"input_prefix": "Hi", "n_predict": TOKENS},
    "/v1/fill": {"parts": ["It is ", {"tokens": 1}], "messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": TOKENS},
    "/v1/messages/count_tokens": {"messages": USER},
    "/api/chat": {"messages": USER, "stream": False},
    "/api/generate": {"prompt": "Hi", "stream": False},
    "/api/show": {"model": "{model}"},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [20, 21]},
    "/apply-template": {"messages": USER},
    "/v1/systemone": {"model": "jev-latest", "state": "Fine.", "questions": ASKED},
    "/v1/decisions": {
        "input": "Fine.",
        "questions": [{"type": "predicate", "instructions": "Good?"}],
    },
    "/reset_prefix_cache": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
"""Of each POST route, a body that is answered."""


@dataclass
class Row:
    """What came of one command or route. memory, predicted: bytes, where both are known."""

    what: str
    status: int
    seconds: float
    memory: int | None = None
    predicted: int | None = None
    note: str = ""
    ok: bool = True

    @property
    def deviation(self) -> float | None:
        """The memory over the prediction, less 1; None where one of them is unknown."""
        return self.memory / self.predicted - 1 if self.memory and self.predicted else None

    @property
    def fault(self) -> str:
        """What is wrong; empty where nothing is."""
        if not self.ok:
            return self.note or "no answer as it should be"
        is_far = abs(self.deviation or 0.0) > MOST_DEVIATION
        return f"over {MOST_DEVIATION:.0%} away from the predicted memory" if is_far else ""


@dataclass
class Report:
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print("  ".join(cells(row)), file=sys.stderr, flush=True)


def cells(row: Row) -> tuple[str, ...]:
    megabytes = [f"{b / 1e6:,.0f} MB" if b is not None else "" for b in (row.memory, row.predicted)]
    ratio = "" if row.deviation is None else f"{row.deviation:+.1%}"
    ending = f"WRONG: {row.fault}" if row.fault else row.note
    return row.what, str(row.status), f"{row.seconds:.1f} s", *megabytes, ratio, ending


@contextmanager
def watched(process: subprocess.Popen[Any]) -> Iterator[PeakMemory]:
    environment.INTERVAL_S = 0.004
    with PeakMemory(Path(f"/proc/{process.pid}/status")) as watch:
        yield watch


def peak(watch: PeakMemory) -> int:
    return int(watch.values().get("peak_anonymous", [0])[0])


def sfumato(*argv: str) -> list[str]:
    return [sys.executable, "-m", "sfumato", *argv]


def run_command(name: str, run: Run, model: Path, folder: Path, env: Mapping[str, str]) -> Row:
    """Runs it to its end."""
    encode = load_text(open_checkpoint(model)).tokenizer.encode
    question = "Hi " * (LONG // len(encode("Hi Hi ", special=False)) * 2)
    argv = [word.format(m=model, q=question) for word in run.argv]
    began = time.perf_counter()
    with (folder / "out").open("w+b") as out:
        process = subprocess.Popen(
            sfumato(*argv),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=env,
        )
        with watched(process) as watch:
            process.communicate(run.stdin.encode(), timeout=PATIENCE_S)
            most = peak(watch)
        seconds = time.perf_counter() - began
        out.seek(0)
        text = out.read().decode(errors="replace")
    ok = process.returncode in run.codes and run.says in text and "Traceback" not in text
    note = "" if ok else text[-300:]
    if process.returncode in REFUSED and ok:
        note = "refused"
    return Row(name, process.returncode, seconds, most if run.loads else None, note=note, ok=ok)


def mapped_of(model: Path) -> int:
    """Bytes of the weights that stay pages of the mapped file, and so are no anonymous memory."""
    checkpoint, device = open_checkpoint(model), torch.device("cpu")
    dtype = pick_dtype("auto", checkpoint, device)
    given = checkpoint, config_of(checkpoint), device, dtype
    return ModelFootprint.of_checkpoint(*given).mapped


def predicted_alone(model: Path, env: Mapping[str, str]) -> tuple[int, float]:
    """What `inspect` says of one request: bytes, and bytes of each token."""
    done = subprocess.run(
        sfumato("inspect", str(model), "--json"), capture_output=True, check=True, env=env
    )
    memory = json.loads(done.stdout)["memory"]
    length, cache = next(iter(memory["kv_cache"].items()))
    fixed = memory["weights"] + memory["vision_tower"] + memory["head_buffer"]
    return fixed - mapped_of(model), cache / int(length)


@contextmanager
def served(model: Path, env: Mapping[str, str]) -> Iterator[tuple[httpx.Client, PeakMemory]]:
    """A server of the checkpoint, and the watch over its memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--slots", str(SLOTS), "--context", str(CONTEXT), "--max-tokens", str(TOKENS))
    argv = sfumato("serve", "-m", str(model), "--port", str(port), *options)
    process = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        with watched(process) as watch, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            for _ in range(int(PATIENCE_S)):
                try:
                    client.get("/readyz").raise_for_status()
                    break
                except httpx.HTTPError:
                    if process.poll() is not None:
                        raise SystemExit(f"the server ended with {process.returncode}") from None
                    time.sleep(1)
            yield client, watch
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask_all(client: httpx.Client, report: Report) -> None:
    """Each route of the description, and as a stream where it has one."""
    description = client.get("/openapi.json").json()
    paths, schemas = description["paths"], description["components"]["schemas"]
    name = client.get("/v1/models").json()["data"][0]["id"]
    response = client.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    calls = [(method, path) for path, methods in paths.items() for method in methods]
    for method, path in sorted(calls, key=lambda call: call[0] == "delete"):
        if method == "post" and path not in BODIES:
            report.add(Row(f"POST {path}", 0, 0.0, note="no body is known for it", ok=False))
            continue
        body = {
            key: name if value == "{model}" else value
            for key, value in BODIES.get(path, {}).items()
        }
        at = path.replace("{model}", name).replace("{response_id}", response)
        content = paths[path][method].get("requestBody", {}).get("content", {})
        schema = (
            content.get("application/json", {}).get("schema", {}).get("$ref", "").split("/")[-1]
        )
        streams = "stream" in schemas.get(schema, {}).get("properties", {})
        bodies = [body, *[body | {"stream": True}] * streams]
        for each in bodies if method == "post" else [None]:
            began = time.perf_counter()
            answer = client.request(method.upper(), at, json=each)
            what = f"{method.upper()} {path}" + (" stream" if each and each.get("stream") else "")
            refusals = {"/cancel": (400, "it has ended"), "_lora_": (404, "not allowed here")}
            known = [each for part, each in refusals.items() if part in path]
            refused = next((why for status, why in known if status == answer.status_code), "")
            ok = answer.status_code == 200 or bool(refused)
            note = refused if ok else answer.text[:200]
            report.add(Row(what, answer.status_code, time.perf_counter() - began, note=note, ok=ok))


def fill_slots(client: httpx.Client, canvas: int) -> None:
    """Both slots at once, to the brim, with the cuts that take memory; and a decision beside."""

    def fill(seed: int) -> None:
        ids = [(7 + seed) * i % 90 + 10 for i in range(CONTEXT - canvas)]
        body = {"prompt": ids, "max_tokens": canvas, "ignore_eos": True, "seed": seed}
        more = {"top_k": 40, "top_p": 0.9, "max_steps": 2, "temperature": 1.0}
        client.post("/v1/completions", json=body | more).raise_for_status()

    with ThreadPoolExecutor(SLOTS) as pool:
        list(pool.map(fill, range(SLOTS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="the checkpoint")
    parser.add_argument(
        "--only",
        choices=("commands", "routes", "memory"),
        help="one half, or the filled server alone",
    )
    parser.add_argument("--nice", type=int, default=0, help="of all processes (0)")
    args = parser.parse_args()
    os.nice(args.nice)
    model, report = args.model.resolve(), Report()
    env = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    env["PYTHONPATH"] = os.pathsep.join(
        str(Path(part).resolve()) for part in env["PYTHONPATH"].split(os.pathsep) if part
    )
    if args.only in (None, "commands"):
        commands(model, report, env)
    memory = {}
    if args.only != "commands":
        memory = routes(model, report, env, with_all=args.only != "memory")
    for line in table([cells(row) for row in report.rows]):
        print(line)
    wrong = [row.what for row in report.rows if row.fault]
    facts = {
        "benchmark": "every_route",
        "model": model.name,
        "bytes": model.stat().st_size,
        "commit": commit(),
        "processor": cpu_name(),
        "commands": sum(row.what in RUNS for row in report.rows),
        "routes": len(report.rows) - sum(row.what in RUNS for row in report.rows),
        "wrong": wrong,
        "server": memory,
        "memory": {row.what: [row.memory, row.predicted] for row in report.rows if row.memory},
    }
    print(json.dumps(facts))
    return bool(wrong)


def bare_bytes(model: Path, env: Mapping[str, str], what: str) -> int:
    """Memory of a process that has imported all of "run" or "serve", and read the vocabulary."""
    argv = [sys.executable, "-c", BARE, str(model), what]
    return int(subprocess.run(argv, capture_output=True, check=True, env=env).stdout)


def commands(model: Path, report: Report, env: Mapping[str, str]) -> None:
    """Every command of the program."""
    masks = family_of(open_checkpoint(model)).canvas.noise == "mask"
    fixed, token = predicted_alone(model, env)
    bare = bare_bytes(model, env, "run")
    with tempfile.TemporaryDirectory() as folder:
        made: Sequence[tuple[str, str]] = (
            ("q.toml", QUESTIONS),
            ("t.csv", LABELLED),
            ("text.txt", "It is a short text, and it is good. " * 3),
        )
        for file, text in made:
            Path(folder, file).write_text(text, encoding="utf-8")
        for command in COMMANDS:
            if command.name in NOT_RUN:
                continue
            if (run := RUNS.get(command.name)) is None:
                report.add(Row(command.name, 0, 0.0, note="not in the table", ok=False))
                continue
            if masks and command.name in REFUSED_OF_MASKS:
                run = replace(run, codes=REFUSED)
            row = run_command(command.name, run, model, Path(folder), env)
            if row.memory is not None:
                row.memory -= bare
                row.predicted = None if run.context is None else int(fixed + token * run.context)
            report.add(row)
            Path(folder, "out.gguf").unlink(missing_ok=True)


def routes(model: Path, report: Report, env: Mapping[str, str], with_all: bool) -> dict[str, int]:
    """Every route, and the memory of the server after all of them: bytes by what they are. No
    question is read while the slots are full: what is kept for these is not in the comparison."""
    bare = bare_bytes(model, env, "serve")
    with served(model, env) as (client, watch):
        began, loaded = time.perf_counter(), peak(watch) - bare
        if with_all:
            ask_all(client, report)
        after = peak(watch) - bare
        fill_slots(client, client.get("/props").json()["canvas_length"])
        most = peak(watch) - bare
        memory = client.get("/memory").json()
        prediction = memory["prediction"]
        idle = prediction["snapshots"] - memory["snapshot_bytes"] + prediction["reads"]
        predicted = prediction["total"] - mapped_of(model) - idle
        what = "serve, all routes, slots full" if with_all else "serve, slots full"
        report.add(Row(what, 200, time.perf_counter() - began, most, predicted))
    return {
        "bare": bare,
        "loaded": loaded,
        "after_routes": after,
        "peak": most,
        "predicted": predicted,
        **prediction,
    }


if __name__ == "__main__":
    sys.exit(main())
