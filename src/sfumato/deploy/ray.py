"""Sfumato on Ray Serve: the HTTP server in front, and an engine in each replica behind it.

Placement, health, autoscaling, draining and rolling updates are Ray's, and so is the choice of the
replica: its consistent hash of sessions, so that a conversation finds its prefix. The names that
are not part of Ray's stable API are those of `pyproject.toml`'s version.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import ray
import torch
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from sfumato import catalog
from sfumato.api import load, load_outline
from sfumato.deploy.engine_client import EngineClient, Facts, ReplicaLost, Report
from sfumato.diffusion.canvas import Draft
from sfumato.engine import DecisionRequest, Engine, Terminal
from sfumato.engine.errors import REFUSALS
from sfumato.engine.request import AnyRequest
from sfumato.options.table import options_of
from sfumato.refused import Refused
from sfumato.server.app import create_app
from sfumato.server.from_options import engine_config, keys_in, server_settings
from sfumato.server.metrics import Metrics
from sfumato.server.models import Models

Options = argparse.Namespace
"""The values of the options of `sfumato deploy`."""

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ANSWER_S = 5.0  # that each replica has to answer what is asked of all of them
HEALTH_PERIOD_S = 5.0
FRONT_REQUESTS = 4096  # HTTP requests of the front at a time
_LOADING = (
    *("device", "dtype", "activations", "quantize", "cache_type", "experts_on_cpu", "gpu_layers"),
    *("split", "other_layers", "mmproj"),
)


class Replica:
    """One engine. Its requests come through a handle, and not over HTTP."""

    def __init__(self, options: Options) -> None:
        """Raises what loading raises."""
        if options.threads:
            torch.set_num_threads(options.threads)
        given = {name: getattr(options, name) for name in _LOADING}
        model = load(options.model, adapters=_adapters(options), **given)
        config = engine_config(options, model.config.context_length)
        self._engine, self._handles = Engine(model, config), dict[str, Any]()
        gc.collect()
        gc.freeze()  # a collection that visits the model's objects stops all threads
        self._engine.warm_up()
        self._engine.start()

    async def events(self, request: AnyRequest) -> AsyncGenerator[Any, None]:
        """What `Replicas.events` gives, but for what is lost."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def deliver(event: Any) -> None:
            if isinstance(event, Draft):  # the front has a tokenizer of its own
                event = replace(event, decode=None)
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            handle = await asyncio.to_thread(self._submit, request, deliver)
        except REFUSALS as error:
            yield error
            return
        self._handles[request.id] = handle
        try:
            yield None
            event = None
            while not isinstance(event, Terminal):
                event = await events.get()
                yield event
        finally:
            del self._handles[request.id]
            handle.cancel()  # where the front has gone

    def _submit(self, request: Any, deliver: Any) -> Any:
        """Raises what `Engine.submit` raises."""
        if isinstance(request, DecisionRequest):
            return self._engine.decide(request, deliver)
        if request.grammar is not None:  # the front's trial was of its own cache
            self._engine.try_grammar(request.grammar, "").result()
        return self._engine.submit(request, deliver)

    async def cancel(self, request_id: str) -> None:
        if (handle := self._handles.get(request_id)) is not None:
            handle.cancel()

    async def facts(self) -> Facts:
        engine = self._engine
        adapters = dict(engine.adapters)
        return Facts(engine.config, engine.longest, engine.served.device, adapters)

    async def report(self) -> Report:
        engine = self._engine
        return Report(engine.health(), engine.state(), engine.used_memory())

    async def reset_prefix_cache(self) -> int:
        return await asyncio.wrap_future(self._engine.reset_prefix_cache())

    async def check_health(self) -> None:
        """Returns between two steps. Ray takes a replica out that raises, or that does not answer
        in time, three times in a row."""
        await asyncio.wrap_future(self._engine.pulse())

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # it was loaded
            self._engine.close()


class RayReplicas:
    """Replicas behind a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def events(self, request: AnyRequest, session: str) -> AsyncGenerator[Any, None]:
        handle = self._handle.options(method_name="events", stream=True, session_id=session)
        stream, ended = handle.remote(request), False
        try:
            async for event in stream:
                yield event
            ended = True
        except RayTaskError:  # of the replica's own code
            raise
        except (RayError, RayServeException, TimeoutError) as error:
            raise ReplicaLost(type(error).__name__) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ReplicaLost("its handle was closed") from None
        finally:
            if not ended:
                stream.cancel()

    async def all(self, method: str, *args: Any) -> list[Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                # Ray's own `results_async` gives nothing where one replica is late.
                results = await self._handle.broadcast(method, *args)._fetch_replica_results_async()
        except (RayError, RayServeException, TimeoutError):
            return []
        answers = (asyncio.wait_for(each.get_async(), ANSWER_S) for each in results)
        given = await asyncio.gather(*answers, return_exceptions=True)
        return [each for each in given if not isinstance(each, BaseException)]


class Front:
    """The HTTP server: tokenizer, templates and dialects, and no weights."""

    def __init__(self, engines: DeploymentHandle, options: Options) -> None:
        self._engines, self._options = engines, options

    async def __serve_build_asgi_app__(self) -> Any:
        """The application, once there is a replica."""
        options, replicas = self._options, RayReplicas(self._engines)
        model = await asyncio.to_thread(load_outline, options.model, options.mmproj)
        facts = await self._engines.facts.remote()
        while not (reports := await replicas.all("report")):
            await asyncio.sleep(1.0)
        client = EngineClient(model, facts, reports, replicas).start()
        metrics = Metrics(client)
        client.on_finish = metrics.observe
        name = options.name or catalog.shown_name(options.model)
        settings = server_settings(options, tuple(options.api_key), {})
        return create_app(Models(name, client), settings, metrics)


def _adapters(options: Options) -> dict[str, str]:
    """Paths by names. Raises Refused."""
    pairs = [given.partition("=") for given in options.adapter]
    if not all(name and path for name, _, path in pairs):
        raise Refused("adapter", f"{options.adapter} are not all NAME=PATH")
    return {name: path for name, _, path in pairs}


def application(options: Options) -> serve.Application:
    """What Ray Serve runs. Raises Refused for options that exclude each other."""
    options = argparse.Namespace(**vars(options) | {"allow_adapters": None, "origins": {}})
    if options.gpu_layers == "auto":
        raise Refused("gpu_layers", "the cards of replicas are not known here", "give a number")
    if options.max_replicas is not None and options.max_replicas < options.replicas:
        raise Refused("max_replicas", f"must be at least --replicas, {options.replicas}")
    if options.api_key_file:
        options.api_key = [*options.api_key, *keys_in(options.api_key_file)]
    _adapters(options)
    server_settings(options, tuple(options.api_key), {})
    replica = serve.deployment(
        name="Engine",
        num_replicas=None if options.max_replicas else options.replicas,
        autoscaling_config={
            "min_replicas": options.replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.slots,  # of a replica: those that wait or run
        }
        if options.max_replicas
        else None,
        # As many wait in a replica as run, so that no slot is free for long; the others wait here.
        max_ongoing_requests=2 * options.slots,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=options.health_timeout,
        graceful_shutdown_timeout_s=options.drain,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options={"num_cpus": options.replica_cpus, "num_gpus": options.replica_gpus},
    )(Replica)
    front = serve.deployment(
        name="Front",
        max_ongoing_requests=FRONT_REQUESTS,
        max_surge_percent=100,  # the new one starts before the old one ends: requests go on
        graceful_shutdown_timeout_s=options.drain,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Front))
    return front.bind(replica.bind(options), options)


def app(args: Mapping[str, str]) -> serve.Application:
    """For `serve run sfumato.deploy.ray:app model=PATH replicas=3`: the options of `sfumato deploy`
    as arguments. Raises Refused."""
    options = {option.name: option for option in options_of("deploy")}
    if unknown := sorted(set(args) - set(options)):
        raise Refused(unknown[0], "is no option of `sfumato deploy`")
    values = {
        option.key: option.kind.parse(args[name])
        if name in args
        else list(option.default)
        if isinstance(option.default, tuple)
        else option.default
        for name, option in options.items()
    }
    return application(argparse.Namespace(**values))


def start(options: Options) -> None:
    """Runs the application on the Ray cluster that RAY_ADDRESS names, or on one of this machine's
    own, and returns when it answers. Raises Refused."""
    made = application(options)
    if not ray.is_initialized():
        # Else Ray starts replicas with a niceness of 15, behind all else on the machine.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(log_to_driver=options.verbose, include_dashboard=False)
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(made)
