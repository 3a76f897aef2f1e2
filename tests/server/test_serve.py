"""`sfumato serve` as a program: what it prints, what it refuses, how it ends; and curl."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.pictures import file_of, picture
from tests.support.preloaded import preloaded

from sfumato.cli import serve
from sfumato.cli.arguments import CommandLine
from sfumato.engine import EngineConfig
from sfumato.engine.audit import MAX_BYTES
from sfumato.options.limits import MOST_STEPS
from sfumato.options.table import OPTIONS
from sfumato.server.http.uvicorn_server import outward_addresses
from sfumato.server.settings import ServerSettings
from sfumato.values import Whole

SRC = Path(__file__).parents[2] / "src"
ALONE = [sys.executable, "-m", "sfumato"]  # with nothing loaded before


class Program:
    """A running `sfumato serve`."""

    def __init__(
        self, command: list[str], *options: str, code: str | None = None, **variables: str
    ) -> None:
        """code: run in place of the command line, with the same options."""
        environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"} | variables
        environment.pop("SFUMATO_API_KEY", None) if "SFUMATO_API_KEY" not in variables else None
        how = ("serve",) if code is None else ()
        if command != ALONE:
            how = (code or "", *how)
        self.process = subprocess.Popen(
            [*command, *how, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.stderr_lines: list[str] = []
        assert self.process.stdout
        for line in self.process.stdout:
            self.stderr_lines.append(line)
            if "Ctrl-C" in line:
                break
        match = re.search(r"http://[\w.\[\]:]+", "".join(self.stderr_lines))
        assert match, self.process.communicate()
        self.url = match[0]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code and what it said on standard error."""
        self.process.send_signal(number)
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stderr


@pytest.fixture(scope="module")
def command() -> Iterator[list[str]]:
    environment = os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    with preloaded(environment) as start_program:
        yield start_program


@pytest.fixture
def start(command: list[str]) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def begin(*options: str, by: list[str] = command, **how: str) -> Program:
        programs.append(Program(by, *options, **how))
        return programs[-1]

    yield begin
    for program in programs:
        if program.process.poll() is None:
            program.process.kill()
        program.process.communicate()


def refuse(command: list[str], *options: str) -> str:
    """The one line that a wrong start ends in."""
    done = subprocess.run(
        [*command, "serve", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(SRC)},
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("sfumato: error: ")
    return line


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl on this machine")
def test_it_prints_a_curl_line_that_works(start: Callable[..., Program], tmp_path: Path) -> None:
    log = tmp_path / "audit.jsonl"
    sizes = ("--slots", "1", "--context", "256")
    program = start("--name", "tiny", "--audit-log", str(log), *sizes, by=ALONE)
    stderr = "".join(program.stderr_lines)
    assert "tiny" in stderr and f"{program.url}/v1" in stderr and "256" in stderr
    line = stderr[stderr.index("curl") : stderr.index("Ctrl-C")].replace("\\\n", " ")
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60)
    reply = json.loads(done.stdout)
    assert reply["model"] == "tiny" and "Sfumato" in reply["choices"][0]["message"]["content"]
    code, complaints = program.end()
    assert code == 0 and complaints.endswith("stopping: no request is running\n")
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert entry["endpoint"] == "/v1/chat/completions" and "text" not in entry


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 400_000}]}),
        ("/v1/completions", {"prompt": "x" * 400_000}),
    ],
)
def test_a_refusal_is_counted_and_audited(
    start: Callable[..., Program], tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    log = tmp_path / "audit.jsonl"
    program = start("--audit-log", str(log), "--slots", "1", "--context", "256")
    assert httpx.post(program.url + path, json=body | {"user": "ann", "n": 2}).status_code == 400
    counted = f'sfumato_requests_total{{endpoint="{path}",outcome="too_large"}} 1.0'
    assert counted in httpx.get(f"{program.url}/metrics").text
    assert httpx.post(program.url + path, content="[").status_code == 400
    _, stderr = program.end()
    entry, other = map(json.loads, log.read_text().splitlines())
    assert (entry["event"], entry["error"], entry["user"]) == ("failed", "too_large", "ann")
    assert entry["seconds"] is None and "xxx" not in log.read_text()
    assert (other["event"], other["endpoint"], other["status"]) == ("refused", path, 400)
    assert re.match(
        r"\d{4}-\d\d-\d\dT[\d:.]+Z WARNING sfumato\.server\.http\.middleware: refused: ", stderr
    )
    assert stderr.count("\n") == 3  # the last one: that it stops


def test_a_signal_lets_requests_finish(start: Callable[..., Program]) -> None:
    """And meanwhile the server answers: it is not ready, lives, and refuses what is new."""
    program = start("--slots", "1", "--context", "4096", "--drain", "30")
    answers: list[httpx.Response] = []
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    body |= {"max_tokens": 320, "max_steps": 8}

    def ask() -> None:
        answers.append(httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until_running(program)
    assert httpx.get(f"{program.url}/readyz").status_code == 200
    program.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + 5
    while (ready := httpx.get(f"{program.url}/readyz")).status_code == 200:
        assert time.monotonic() < until
    assert ready.status_code == 503 and "shutting down" in ready.json()["reason"]
    assert httpx.get(f"{program.url}/livez").status_code == 200
    late = httpx.post(f"{program.url}/v1/chat/completions", json=body | {"max_tokens": 1})
    assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
    assert late.headers["connection"] == "close" and not answers
    _, stderr = program.process.communicate(timeout=30)
    thread.join()
    assert program.process.returncode == 0 and "1 request has 30 seconds" in stderr
    assert answers[0].json()["usage"]["completion_tokens"] == 320


def test_what_is_not_done_in_time_ends_in_an_error(start: Callable[..., Program]) -> None:
    program = start("--slots", "1", "--context", "4096", "--drain", "0.2")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    body |= {"max_tokens": 4000, "confidence": 1e-9, "stream": True}
    lines: list[str] = []

    def ask() -> None:
        url = f"{program.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until_running(program)
    began = time.monotonic()
    code, _ = program.end(signal.SIGINT)
    thread.join()
    assert (code, lines[-1]) == (0, "data: [DONE]")
    assert json.loads(lines[-2][6:])["error"]["code"] == "shutdown"
    assert time.monotonic() - began < 15


def test_a_second_signal_ends_it_at_once(start: Callable[..., Program], tmp_path: Path) -> None:
    """Also in the middle of a step, which Python must not clear up under."""
    log = tmp_path / "audit.jsonl"
    program = start("--context", "4096", "--drain", "60", "--audit-log", str(log))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    body |= {"max_tokens": 2000, "confidence": 1e-9, "stream": True, "n": 4}
    lines: list[str] = []

    def ask() -> None:
        url = f"{program.url}/v1/chat/completions"
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=body, timeout=60) as response,
        ):
            lines.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until_running(program)
    program.process.send_signal(signal.SIGTERM)
    assert program.process.stderr
    stderr = program.process.stderr.readline()
    assert "4 requests have 60 seconds to finish; a second signal" in stderr
    began = time.monotonic()
    code, stderr = program.end()
    thread.join()
    assert (code, stderr) == (1, "")
    assert time.monotonic() - began < 20
    assert json.loads(lines[-2][6:])["error"]["code"] == "shutdown"
    assert [json.loads(line)["error"] for line in log.read_text().splitlines()] == ["shutdown"] * 4


BROKEN = """
import sys
import sfumato.engine.circuit as circuit
from sfumato.cli import main
from sfumato.model.network import Network

def fail(*_):
    raise {error}("the device is lost")

circuit.WAITS_S = (0.05, 0.1)
Network.denoise_batch = fail
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("error", "requests"), [("RuntimeError", 3), ("SystemExit", 1)])
def test_it_exits_where_failures_last_or_the_thread_dies(
    start: Callable[..., Program], error: str, requests: int
) -> None:
    """So that systemd or Kubernetes starts it again."""
    program = start("--context", "128", code=BROKEN.format(error=error))
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for _ in range(requests):
        answer = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 500
    _, stderr = program.process.communicate(timeout=60)
    assert program.process.returncode == 70
    last = stderr.splitlines()[-1]
    assert "the engine has stopped" in last and "start it again" in last
    assert error in last


def wait_until_running(program: Program) -> None:
    until = time.monotonic() + 20
    while not httpx.get(f"{program.url}/state").json()["running"]:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("where", ["option", "file", "variable"])
def test_the_key_from_everywhere(start: Callable[..., Program], tmp_path: Path, where: str) -> None:
    file = tmp_path / "key"
    file.write_text("abc\n")
    options = {"option": ("--api-key", "abc "), "file": ("--api-key-file", str(file))}
    variables = {"SFUMATO_API_KEY": "abc\n"} if where == "variable" else {}
    program = start("--context", "128", *options.get(where, ()), **variables)
    assert httpx.get(f"{program.url}/v1/models").status_code == 401
    right = {"Authorization": "Bearer abc"}
    assert httpx.get(f"{program.url}/v1/models", headers=right).status_code == 200
    assert "abc" not in "".join(program.stderr_lines)


def test_it_warns_where_everybody_may_ask(start: Callable[..., Program]) -> None:
    """And says at which addresses that is."""
    program = start("--host", "0.0.0.0", "--context", "128", "--log-format", "json")
    port = program.url.rpartition(":")[2]
    elsewhere = re.findall(r"  network  (http://.+)/\n", "".join(program.stderr_lines))
    addresses = [address for address in outward_addresses() if ":" not in address]
    assert elsewhere == [f"http://{address}:{port}" for address in addresses]
    for url in elsewhere:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert answer.status == 200
    _, stderr = program.end()
    line = json.loads(stderr.splitlines()[0])
    assert line["level"] == "warning" and "--api-key" in line["message"] and line["time"]


@pytest.mark.parametrize(
    ("host", "urls"),
    [
        ("0.0.0.0", ["http://192.0.2.7:80"]),
        ("::", ["http://192.0.2.7:80", "http://[fd00::7]:80"]),
        ("127.0.0.1", []),
        ("192.0.2.7", []),  # shown already
    ],
)
def test_urls_for_other_machines(
    monkeypatch: pytest.MonkeyPatch, host: str, urls: list[str]
) -> None:
    monkeypatch.setattr(serve, "outward_addresses", lambda: ["192.0.2.7", "fd00::7"])
    assert serve._outward_urls(host, "80") == urls


def test_a_machine_without_a_network_has_no_outward_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(asking: object, place: tuple[str, int]) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert outward_addresses() == []


def test_wrong_starts_are_one_clear_line(command: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}" in refuse(ALONE, "--port", port)
    command = [*command, ""]
    assert "--host" in refuse(command, "--host", "no.such.host.invalid")
    assert "nothing.gguf" in refuse(command, "--port", "0", "-m", "nothing.gguf")
    assert "--cors-origin" in refuse(command, "--cors-origin", "*")
    assert "give one" in refuse(command, "--api-key", "a", "--api-key-file", "b")
    assert "missing-key" in refuse(command, "--api-key-file", str(tmp_path / "missing-key"))
    wrong_log = ("--audit-log", str(tmp_path / "no" / "log"))
    assert "audit" in refuse(
        command, "--port", "0", *wrong_log, "-m", "nothing.gguf"
    )  # before it is loaded
    assert "is no size" in refuse(command, "--max-body", "lots")
    assert "--max-body" in refuse(command, "--max-body", "0")
    assert "whole number" in refuse(command, "--slots", "0")


def test_options_of_pictures(
    start: Callable[..., Program], command: list[str], tmp_path: Path
) -> None:
    """The bound, the folder and the hosts, as a program that was started with them answers."""
    (tmp_path / "in").mkdir()
    for name in ("in/a.png", "b.png"):
        (tmp_path / name).write_bytes(file_of(picture(40, 30), "PNG"))
    folder = "--allow-image-files", str(tmp_path / "in")
    program = start("--limit-mm-per-prompt", "image=2", *folder, "--allow-image-urls", "a.example")
    assert httpx.get(f"{program.url}/props").json()["limits"]["images"] == 2

    def answer_to(*urls: str) -> tuple[int, str]:
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        reply = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=60)
        return reply.status_code, reply.text

    inside = f"file://{tmp_path}/in/a.png"
    assert answer_to(inside, inside)[0] == 200
    for urls, words in (
        ((inside,) * 3, "2"),
        ((f"file://{tmp_path}/b.png",), "not in the folder"),
        (("http://b.example/a.png",), "not fetched from b.example"),
    ):
        status, text = answer_to(*urls)
        assert status == 400 and words in text
    command = [*command, ""]
    assert "8 or image=8" in refuse(command, "--limit-mm-per-prompt", "video=3")
    assert "is no folder" in refuse(command, "--allow-image-files", str(tmp_path / "nowhere"))


def test_defaults_are_those_of_the_settings() -> None:
    args = CommandLine().parse_args(["serve"])
    config, settings = EngineConfig(), ServerSettings()
    assert (args.slots, args.queue, args.snapshot_memory) == (
        config.slots,
        config.queue,
        config.snapshot_bytes,
    )
    assert (args.memory_margin / 100, args.prefill_chunk) == (
        config.memory_margin,
        config.prefill_chunk,
    )
    assert (args.strict, args.request_timeout) == (config.strict, config.request_timeout_s)
    assert args.max_steps == config.max_steps
    (steps,) = [option.kind for option in OPTIONS if option.name == "max-steps"]
    assert steps == Whole(1, MOST_STEPS)
    shared = ("max_body", "max_values", "max_messages", "max_choices", "max_tokens", "lenient")
    for name in (*shared, "response_store"):
        assert getattr(args, name) == getattr(settings, name)
    assert (args.host, args.port, args.audit_max_bytes) == ("127.0.0.1", 8080, MAX_BYTES)


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("2K", 2048), ("8m", 8 << 20)])
def test_sizes(text: str, size: int) -> None:
    assert CommandLine().parse_args(["serve", "--max-body", text]).max_body == size


@pytest.mark.parametrize("insists", [False, True])
def test_an_upload_that_stalls_holds_nothing_up(
    start: Callable[..., Program], insists: bool
) -> None:
    program = start("--context", "128", "--drain", "30")
    host, port = program.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"POST /tokenize HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n"
        raw.sendall(head.encode())
        time.sleep(0.3)
        began = time.monotonic()
        if insists:
            program.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        code, stderr = program.end()
        assert code == (1 if insists else 0) and stderr.count("\n") == 1 and "stopping: " in stderr
        assert time.monotonic() - began < 20
