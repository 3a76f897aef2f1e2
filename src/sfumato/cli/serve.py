"""`sfumato serve`: a model behind HTTP, until a signal comes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from sfumato.cli import generation
from sfumato.cli.arguments import origin_of
from sfumato.engine import Engine, EngineConfig, Terminal
from sfumato.engine.audit import AuditLog, AuditWriter, facts
from sfumato.engine.request import AnyRequest
from sfumato.refused import Refused
from sfumato.server.app import create_app
from sfumato.server.http import logs
from sfumato.server.http.logs import RateLimit
from sfumato.server.http.uvicorn_server import SIGNALS, Listener, bind, outward_addresses
from sfumato.server.metrics import Metrics
from sfumato.server.settings import ServerSettings

log = logging.getLogger(__name__)

ANY_ADDRESS = ("0.0.0.0", "::", "")
DIED = 70  # the exit code of a server whose engine has stopped; sysexits.h: internal error
FORCED = 1  # the exit code after a second signal
OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def main(args: argparse.Namespace) -> int:
    """Serve, and return the exit code. Raises ValueError or OSError for bad input."""
    logs.configure(args.log_format, args.verbose)
    settings = _settings(args)
    bound = bind(args.host, args.port)  # before the model is loaded: the port may be taken
    if not settings.api_keys and not _is_loopback(args.host):
        log.warning(
            "everybody who reaches %s may use this server; --api-key asks for a key", args.host
        )
    with bound, _audit_log(args) as audit:
        code, working = _serve(args, settings, bound, audit)
    if working:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """Ends the process without Python's cleanup, which aborts while a thread is in torch."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve(
    args: argparse.Namespace,
    settings: ServerSettings,
    bound: socket.socket,
    audit: AuditWriter | None,
) -> tuple[int, bool]:
    """Loads the model and serves until a signal comes or the engine dies. Returns the exit code,
    and whether the engine's thread may still be in a step."""
    ends: list[Callable[[AnyRequest, Terminal], None]] = []

    def finished(request: AnyRequest, event: Terminal) -> None:
        for listen in ends:
            listen(request, event)

    generation.check_device(args.device)
    layout = partial(_config, args)
    generation.choose_layers(args, layout, one_device=True)  # checks the memory before it loads
    model = generation.load(args)
    config = _config(args, model.config.context_length)
    engine = Engine(model, config, on_finish=finished)
    metrics = Metrics(engine, audit)
    ends.append(metrics.observe)
    if audit is not None:
        ends.append(_recorder(audit, engine, settings.model_name))
    app = create_app(engine, settings, metrics, None if audit is None else audit.write)
    url = f"http://{_shown(args.host)}:{bound.getsockname()[1]}"
    listener = Listener(
        app,
        args.drain,
        engine.close,
        ready=lambda: _announce(args, engine, settings, url),
        dead=lambda: engine.death is not None,
        halt=lambda: engine.close(join_s=0.0),
        running=lambda: engine.health().running + engine.health().waiting,
        access_log=args.verbose,
    )
    # These objects live as long as the server: a garbage collection that visits them stops all
    # threads.
    gc.collect()
    gc.freeze()
    engine.warm_up()
    engine.start()
    try:
        listener.run(sockets=[bound])
    finally:
        forced = _close(engine, listener.force_exit)
    working = any(thread.name == "sfumato-engine" for thread in threading.enumerate())
    if engine.death is not None:
        log.critical("%s; start it again", engine.death)
    code = FORCED if forced else 0 if engine.death is None else DIED
    return code, forced or working


def _close(engine: Engine, forced: bool) -> bool:
    """Ends the engine; returns whether a second signal has come, which waits for no step."""
    if not forced:
        try:
            engine.close()
        except (KeyboardInterrupt, SystemExit):
            forced = True
    if forced:
        for number in SIGNALS:  # a third signal ends the process as it ends any other
            signal.signal(number, signal.SIG_DFL)
        engine.close(join_s=0.0)
    return forced


def _settings(args: argparse.Namespace) -> ServerSettings:
    shows_path = args.model and args.show_model_path
    settings = ServerSettings(
        model_name=args.name or (Path(args.model).name if args.model else "sfumato-embedded"),
        aliases=tuple(args.alias),
        api_keys=_api_keys(args),
        public_models=args.public_models,
        model_path=str(Path(args.model).resolve()) if shows_path else None,
        cors_origins=tuple(args.cors_origin),
        lenient=args.lenient,
        max_body=args.max_body,
        max_values=args.max_values,
        max_messages=args.max_messages,
        max_choices=args.max_choices,
        response_store=args.response_store,
        limit_images=args.limit_mm_per_prompt,
        image_hosts=tuple(args.allow_image_urls),
        image_folder=Path(args.allow_image_files) if args.allow_image_files else None,
        max_tokens=args.max_tokens,
        pooling=args.pooling,
    )
    if settings.api_keys:
        return settings
    # Without a key, a page whose host name resolves to this address (DNS rebinding) is refused.
    return replace(settings, hosts=OWN_NAMES) if _is_loopback(args.host) else settings


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys, or those in the file, one a line: the ones that the stronger source names."""
    by_text, by_file = origin_of(args, "api_key").rank, origin_of(args, "api_key_file").rank
    if by_text and by_text == by_file:
        raise Refused(("api_key", "api_key_file"), "give one of them")
    if by_file > by_text:
        lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise Refused("api_key_file", f"{args.api_key_file} has no key")
    else:
        keys = [key.strip() for key in args.api_key]
    return tuple(dict.fromkeys(keys))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _config(args: argparse.Namespace, longest: int) -> EngineConfig:
    """longest: the context that the model was made for."""
    return EngineConfig(
        slots=args.slots,
        context=args.context or min(EngineConfig.context, longest),
        queue=args.queue,
        strict=args.strict,
        snapshot_bytes=args.snapshot_memory,
        memory_margin=args.memory_margin / 100,
        prefill_chunk=args.prefill_chunk,
        max_steps=args.max_steps,
        request_timeout_s=args.request_timeout or None,
    )


def _audit_log(args: argparse.Namespace) -> AbstractContextManager[AuditWriter | None]:
    """The open audit log: a path that cannot be written is refused before the model is loaded."""
    if not args.audit_log:
        return nullcontext()
    log = AuditLog(args.audit_log, max_bytes=args.audit_max_bytes, text=args.audit_text)
    return closing(AuditWriter(log))


def _recorder(
    log: AuditWriter, engine: Engine, name: str
) -> Callable[[AnyRequest, Terminal], None]:
    budget = engine.state().memory.budget
    limit = RateLimit()

    def record(request: AnyRequest, event: Terminal) -> None:
        held_back: int | None = 0
        if event.account is None:  # refused: a client may cause any number of these
            held_back = limit.passes(getattr(event, "kind", None))
        if held_back is not None:
            log.record(request, event, facts(engine.model, name, budget), held_back)

    return record


def _shown(host: str) -> str:
    """The host as a URL of this machine has it."""
    if host in ANY_ADDRESS:
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _outward_urls(host: str, port: str) -> list[str]:
    """The URLs at which other machines reach a server that listens on all addresses."""
    if host not in ANY_ADDRESS:
        return []
    addresses = outward_addresses()
    if host == "0.0.0.0":
        addresses = [address for address in addresses if ":" not in address]
    return [f"http://{_shown(address)}:{port}" for address in addresses]


def _announce(args: argparse.Namespace, engine: Engine, settings: ServerSettings, url: str) -> None:
    """Prints where the server listens, and how to call it."""
    config = engine.config
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    elsewhere = "".join(
        f"  network  {other}/\n" for other in _outward_urls(args.host, url.rpartition(":")[2])
    )
    body = json.dumps({"messages": [{"role": "user", "content": "Who are you?"}]})
    print(
        f"{settings.model_name} on {url} ({config.slots} slots of {config.context:,} tokens)\n"
        f"  page     {url}/\n"
        f"{elsewhere}"
        f"  clients  base URL {url}/v1, model {settings.model_name}\n"
        f"  try      curl {url}/v1/chat/completions{key} \\\n"
        f"             -H 'Content-Type: application/json' -d '{body}'\n"
        "Ctrl-C stops it.",
        flush=True,
    )
    if args.open:  # some browsers return only when they are closed
        threading.Thread(target=webbrowser.open, args=(f"{url}/",), daemon=True).start()
