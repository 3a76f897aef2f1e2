"""From the values of a command's options to those of an engine and of a server."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from sfumato.engine import EngineConfig
from sfumato.refused import Refused
from sfumato.server.settings import ServerSettings

OWN_NAMES = ("localhost", "127.0.0.1", "::1")


def engine_config(args: argparse.Namespace, longest: int) -> EngineConfig:
    """The engine that the options describe. longest: the context that the model was made for."""
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


def server_settings(
    args: argparse.Namespace, keys: tuple[str, ...], paths: Mapping[str, str]
) -> ServerSettings:
    """The HTTP side that the options describe. keys: that clients need one of; paths: what /props
    shows of where models lie. Raises ValueError."""
    return ServerSettings(
        aliases=tuple(args.alias),
        api_keys=keys,
        public_models=args.public_models,
        public_metrics=args.public_metrics,
        model_paths=paths,
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
        adapter_folder=Path(args.allow_adapters) if args.allow_adapters else None,
        max_tokens=args.max_tokens,
        pooling=args.pooling,
        # Without a key, a page whose host name resolves to this address (DNS rebinding) is refused.
        hosts=OWN_NAMES if not keys and is_loopback(args.host) else None,
    )


def keys_in(path: str) -> tuple[str, ...]:
    """The keys of a file, one a line. Raises OSError, and Refused where there is none."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise Refused("api_key_file", f"{path} has no key")
    return keys


def is_loopback(host: str) -> bool:
    """Whether an address is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
