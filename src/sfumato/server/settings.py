"""`ServerSettings`: the operator's choices for the HTTP side. Knows no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sfumato.options.limits import name_fault

MOST_KEYS = 1024  # each request is compared with all of them


@dataclass(frozen=True)
class ServerSettings:
    """The table of options repeats these defaults where an option has one: it imports nothing."""

    aliases: tuple[str, ...] = ()  # further names of the first model, which /v1/models lists
    api_keys: tuple[str, ...] = ()  # one of which is asked for; none: no key is asked for
    public_models: bool = False  # /v1/models needs no key
    public_metrics: bool = False  # /metrics needs no key
    # What /props shows of where models lie, by their names; else it has the names of the files.
    model_paths: Mapping[str, str] = field(default_factory=dict)
    cors_origins: tuple[str, ...] = ()  # web pages elsewhere that may call, as https://host:port
    hosts: tuple[str, ...] | None = None  # Host headers that are answered; None: all
    lenient: bool = False  # unknown fields are ignored instead of refused
    max_body: int = 8 * 2**20  # bytes of a request
    max_values: int = 2**17  # in a request: numbers, texts, keys, lists …
    max_messages: int = 1024
    max_choices: int = 128  # replies of one HTTP request: n, or n times the prompts
    max_tokens: int = 4096  # of a reply whose request names no limit, where the context has as many
    pooling: str = "mean"  # of embeddings whose request names none
    response_store: int = 64 * 2**20  # bytes of responses that clients may name again; 0: none
    limit_images: int = 8  # pictures of a request
    image_hosts: tuple[str, ...] = ()  # that pictures are fetched from; see `media.fetch.fetched`
    image_folder: Path | None = None  # of the files that may be read as pictures; None: none
    adapter_folder: Path | None = None  # of the adapters that clients may load; None: none
    batch_dir: Path | None = None  # of the files of batches; None: batches are off
    batch_space: int = 4 * 2**30  # bytes of all its files
    keepalive_s: float = 9.0  # of a silent stream, until a comment is sent: no client waits for 10
    page: bool = True  # serve the web page

    def __post_init__(self) -> None:
        for origin in self.cors_origins:
            if not _is_origin(origin):
                raise ValueError(
                    f"--cors-origin: {origin!r} is no origin; write scheme, host and port, and no "
                    "path, as in https://chat.example:8443"
                )
        counts = ("max_body", "max_values", "max_messages", "max_choices", "max_tokens")
        for name, least in (
            *((name, 1) for name in counts),
            ("response_store", 0),
            ("batch_space", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')}: must be at least {least}")
        if self.limit_images < 0:
            raise ValueError("--limit-mm-per-prompt: must be at least 0")
        if self.image_folder is not None and not self.image_folder.is_dir():
            raise ValueError(f"--allow-image-files: {self.image_folder} is no folder")
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise ValueError(f"--allow-adapters: {self.adapter_folder} is no folder")
        for name in self.aliases:
            if why := name_fault(name):
                raise ValueError(f"--alias: {name!r} {why}")
        if len(self.api_keys) > MOST_KEYS:
            raise ValueError(f"--api-key: at most {MOST_KEYS} keys, got {len(self.api_keys)}")
        for key in self.api_keys:
            _check_key(key)


def _check_key(key: str) -> None:
    if not key.strip():
        raise ValueError("--api-key: is empty; leave it out to ask for no key")
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ValueError(
            "--api-key: must be of printable ASCII characters without spaces around them, as HTTP "
            "headers carry them"
        )


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:  # as for half an IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc) and not parts.path
