"""`sfumato serve`: a model behind HTTP, until a signal comes."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from sfumato import catalog
from sfumato.cli import generation, resolve_models
from sfumato.cli.arguments import origin_of
from sfumato.engine import Engine, Terminal
from sfumato.engine.audit import AuditLog, AuditWriter, facts
from sfumato.engine.request import AnyRequest
from sfumato.options.limits import name_fault
from sfumato.refused import Refused
from sfumato.server.app import create_app
from sfumato.server.chat.deltas import text_and_bytes
from sfumato.server.from_options import engine_config, is_loopback, keys_in, server_settings
from sfumato.server.http import logs
from sfumato.server.http.logs import RateLimit
from sfumato.server.http.uvicorn_server import SIGNALS, Listener, bind, outward_addresses
from sfumato.server.metrics import Metrics
from sfumato.server.models import LOADER, Models, ServedAdapter
from sfumato.server.service import token_text
from sfumato.server.settings import ServerSettings

log = logging.getLogger(__name__)

_ONE = "loaded when a request names it, one model at a time"
ANY_ADDRESS = ("0.0.0.0", "::", "")
DIED = 70  # the exit code of a server whose engine has stopped; sysexits.h: internal error
FORCED = 1  # the exit code after a second signal
Adapters = dict[str, ServedAdapter]
Served = Mapping[str, argparse.Namespace]
"""The options of each model by its name; the first is loaded at the start."""


def main(args: argparse.Namespace) -> int:
    """Serve, and return the exit code. Raises ValueError or OSError for bad input."""
    logs.configure(args.log_format, args.verbose)
    served = _served(args)
    settings = _settings(args, served)
    bound = bind(args.host, args.port)  # before the model is loaded: the port may be taken
    if not settings.api_keys and not is_loopback(args.host):
        log.warning(
            "everybody who reaches %s may use this server; --api-key asks for a key", args.host
        )
    with bound, _audit_log(args) as audit:
        code, working = _serve(args, served, settings, bound, audit)
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


class _Loader:
    """Loads models, one at a time. Their engines share the metrics and the audit log."""

    def __init__(
        self, served: Served, audit: AuditWriter | None, adapters: Adapters | None = None
    ) -> None:
        """adapters: of all models, as they are when one is loaded."""
        self._served, self._audit, self._adapters = (
            served,
            audit,
            {} if adapters is None else adapters,
        )
        self._ends: list[Callable[[AnyRequest, Terminal], None]] = []
        self.metrics: Metrics | None = None

    def made(self, name: str) -> Engine:
        """An engine that is not started. Raises ValueError or OSError."""
        own = _checked(self._served[name])  # the memory, before anything is loaded
        adapters = {each: one for each, one in self._adapters.copy().items() if one.base == name}
        own.adapter = {each: one.path for each, one in adapters.items() if not one.by_client}
        model = generation.load(own)
        for each, one in adapters.items():
            try:
                if one.by_client:
                    model.load_adapter(each, one.path)
            except (ValueError, OSError) as error:  # must not keep the model from its clients
                log.warning("the adapter %s, which a client loaded, is left out: %s", each, error)
        config = engine_config(own, model.config.context_length)
        engine = Engine(model, config, on_finish=self._finished)
        self.metrics = self.metrics or Metrics(engine, self._audit)
        self.metrics.engine = engine
        self._ends = [self.metrics.observe]
        if self._audit is not None:
            self._ends.append(_recorder(self._audit, engine, name))
        return engine

    def replaced(self, name: str) -> Engine:
        """An engine that is started, in the place of one that was closed. Raises ValueError or
        OSError, and what devices raise."""
        assert self.metrics is not None
        self._forget()
        try:
            engine = self.made(name)
            _freeze()
            engine.warm_up()
            return engine.start()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Frees the memory of the model before, which caches and cycles of objects may keep."""
        assert self.metrics is not None
        self.metrics.engine, self._ends = None, []
        token_text.cache_clear()
        text_and_bytes.cache_clear()
        gc.unfreeze()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()

    def _finished(self, request: AnyRequest, event: Terminal) -> None:
        for listen in self._ends:
            listen(request, event)


def _freeze() -> None:
    """Takes the objects of a model out of garbage collection: one that visits them stops all
    threads, and they live as long as the model."""
    gc.collect()
    gc.freeze()


def _serve(
    args: argparse.Namespace,
    served: Served,
    settings: ServerSettings,
    bound: socket.socket,
    audit: AuditWriter | None,
) -> tuple[int, bool]:
    """Loads the first model and serves until a signal comes or the engine dies. Returns the exit
    code, and whether a thread may still be in a step or load a model."""
    generation.check_device(args.device)
    adapters, (first, *others) = _adapters(args, served), served
    loader = _Loader(served, audit, adapters)
    for name in others:
        _checked(served[name])
    engine = loader.made(first)
    models = Models(first, engine, others, loader.replaced, adapters)
    app = create_app(models, settings, loader.metrics, None if audit is None else audit.write)
    url = f"http://{_shown(args.host)}:{bound.getsockname()[1]}"

    def ready() -> None:
        if app.state.batches is not None:
            app.state.batches.resume()
        _announce(args, models, settings, url)

    listener = Listener(
        app,
        args.drain,
        models.close,
        ready=ready,
        dead=lambda: models.death is not None,
        halt=lambda: models.close(join_s=0.0),
        running=models.under_way,
        access_log=args.verbose,
    )
    _freeze()
    engine.warm_up()
    engine.start()
    del engine  # another model may take its place, and then needs its memory
    try:
        listener.run(sockets=[bound])
    finally:
        forced = _close(models, listener.force_exit)
    working = any(thread.name in ("sfumato-engine", LOADER) for thread in threading.enumerate())
    if models.death is not None:
        log.critical("%s; start it again", models.death)
    code = FORCED if forced else 0 if models.death is None else DIED
    return code, forced or working


def _close(models: Models, forced: bool) -> bool:
    """Ends the engine; returns whether a second signal has come, which waits for no step."""
    if not forced:
        try:
            models.close()
        except (KeyboardInterrupt, SystemExit):
            forced = True
    if forced:
        for number in SIGNALS:  # a third signal ends the process as it ends any other
            signal.signal(number, signal.SIG_DFL)
        models.close(join_s=0.0)
    return forced


def _served(args: argparse.Namespace) -> Served:
    """The models that `--model` names. Raises Refused, and what a download raises."""
    served: dict[str, argparse.Namespace] = {}
    for given in args.model or [None]:
        name, path = _name_and_path(given)
        if args.name and (name or len(args.model) > 1):
            raise Refused("name", "is for one model that has no other name", _NAMED)
        own = argparse.Namespace(**vars(args) | {"model": path, "name": name or args.name})
        if served:
            own.mmproj = None  # the first one's
        resolve_models(own)
        if own.name is not None and (why := name_fault(own.name)):
            raise Refused("model" if name else "name", f"{own.name!r} {why}")
        own.name = own.name or catalog.shown_name(own.model)
        if own.name in served:
            raise Refused("model", f"two are called {own.name!r}", _NAMED)
        served[own.name] = own
    for name in args.alias:
        if name in served:
            raise Refused("alias", f"{name!r} is the name of a model", "choose another one")
    return served


_NAMED = "name each as in --model small=PATH"


def _name_and_path(given: str | None) -> tuple[str | None, str | None]:
    """The parts of NAME=PATH; a path that exists, or that has its = in a later part, is one."""
    name, equals, path = (given or "").partition("=")
    if given is None or not equals or set(name) & set("/\\:") or os.path.exists(given):
        return None, given
    if not (name and path):
        raise Refused("model", f"{given!r} is neither a path nor NAME=PATH")
    return name, path


def _adapters(args: argparse.Namespace, served: Served) -> Adapters:
    """Returns the adapters that `--adapter` names. Raises Refused."""
    adapters: Adapters = {}
    for given in args.adapter:
        named, equals, path = given.partition("=")
        name, at, base = named.partition("@")
        if not (equals and path) or name_fault(name):
            raise Refused("adapter", f"{given!r} is not NAME=PATH")
        if at and base not in served:
            names = ", ".join(served)
            raise Refused("adapter", f"{given!r} names no model here", f"there is {names}")
        if not at and len(served) > 1:
            raise Refused("adapter", f"{given!r} is of which model?", f"write {name}@MODEL=PATH")
        if name in (*served, *args.alias, *adapters):
            raise Refused("adapter", f"{name!r} is the name of a model or adapter already")
        adapters[name] = ServedAdapter(base or next(iter(served)), path)
    return adapters


def _checked(given: argparse.Namespace) -> argparse.Namespace:
    """The options of a model, with layers for the devices. Raises ValueError or OSError where its
    files are wrong or the memory does not suffice."""
    own = argparse.Namespace(**vars(given))
    generation.choose_layers(own, partial(engine_config, own), one_device=True)
    return own


def _settings(args: argparse.Namespace, served: Served) -> ServerSettings:
    paths = {name: str(Path(own.model).resolve()) for name, own in served.items() if own.model}
    settings = server_settings(args, _api_keys(args), paths if args.show_model_path else {})
    folder = Path(args.batch_dir) if args.batch_dir else None
    return replace(settings, batch_dir=folder, batch_space=args.batch_space)


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys, or those in the file, one a line: the ones that the stronger source names."""
    by_text, by_file = origin_of(args, "api_key").rank, origin_of(args, "api_key_file").rank
    if by_text and by_text == by_file:
        raise Refused(("api_key", "api_key_file"), "give one of them")
    if by_file > by_text:
        keys = keys_in(args.api_key_file)
    else:
        keys = tuple(key.strip() for key in args.api_key)
    return tuple(dict.fromkeys(keys))


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


def _announce(args: argparse.Namespace, models: Models, settings: ServerSettings, url: str) -> None:
    """Prints where the server listens, and how to call it."""
    config = models.engine.config
    key = " -H 'Authorization: Bearer KEY'" if settings.api_keys else ""
    elsewhere = "".join(
        f"  network  {other}/\n" for other in _outward_urls(args.host, url.rpartition(":")[2])
    )
    others = f"  also     {', '.join(models.names[1:])}: {_ONE}\n" if models.names[1:] else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Who are you?"}]})
    print(
        f"{models.name} on {url} ({config.slots} slots of {config.context:,} tokens)\n"
        f"  page     {url}/\n"
        f"{elsewhere}"
        f"  clients  base URL {url}/v1, model {models.name}\n"
        f"{others}"
        f"  try      curl {url}/v1/chat/completions{key} \\\n"
        f"             -H 'Content-Type: application/json' -d '{body}'\n"
        "Ctrl-C stops it.",
        flush=True,
    )
    if args.open:  # some browsers return only when they are closed
        threading.Thread(target=webbrowser.open, args=(f"{url}/",), daemon=True).start()
