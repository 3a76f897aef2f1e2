"""The options of `sfumato serve` alone: the engine, HTTP, the audit log."""

from __future__ import annotations

from sfumato.options.kinds import (
    AUDIT,
    ENGINE,
    FLAG,
    FROM_1,
    HTTP,
    PATH,
    POOLINGS,
    SECONDS,
    SERVE,
    SIZE,
    TEXT,
)
from sfumato.options.limits import MOST_STEPS
from sfumato.options.option import Option
from sfumato.values import Choice, Each, Whole

# A row is a line or two; the formatter would make it nine.
# fmt: off
SERVING = (
    # Name, kind, commands, help, default, metavar, group.
    # The engine.
    Option("slots", FROM_1, SERVE, "requests that run at a time", 4, "N", ENGINE),
    Option("context", FROM_1, SERVE,
           "tokens of a slot; default: 8192, or fewer", None, "N", ENGINE),
    Option("queue", FROM_1, SERVE, "requests that may wait", 64, "N", ENGINE),
    Option("strict", FLAG, SERVE, "refuse what does not fit a slot", False, "", ENGINE),
    Option("snapshot-memory", SIZE, SERVE,
           "memory of the device for snapshots of earlier prompts", 2**30, "SIZE", ENGINE),
    Option("memory-margin", Whole(0, 99), SERVE,
           "share of the memory that stays free", 5, "PERCENT", ENGINE),
    Option("prefill-chunk", FROM_1, SERVE,
           "prompt tokens encoded between two steps of other requests, at most",
           512, "N", ENGINE),
    Option("max-steps", Whole(1, MOST_STEPS), SERVE,
           "denoising steps per canvas that a request may ask for", 256, "N", ENGINE),
    Option("request-timeout", SECONDS, SERVE,
           "a request fails after S seconds; 0: never", 21_600.0, "S", ENGINE),
    Option("drain", SECONDS, SERVE,
           "at the end, wait S seconds for running requests", 30.0, "S", ENGINE),
    # HTTP
    Option("host", TEXT, SERVE, "address to listen on; 0.0.0.0: all", "127.0.0.1", "ADDRESS", HTTP),
    Option("port", Whole(0, 65535), SERVE, "0: any free one", 8080, "N", HTTP),
    Option("name", TEXT, SERVE,
           "what clients call the model; default: the file's name", None, "TEXT", HTTP),
    Option("alias", Each(TEXT), SERVE,
           "another name of the model; may be given several times", (), "TEXT", HTTP),
    Option("api-key", Each(TEXT), SERVE,
           "ask clients for this key; may be given several times; better in SFUMATO_API_KEY",
           (), "KEY", HTTP, secret=True),
    Option("api-key-file", PATH, SERVE, "file that has the keys, one a line", None, "FILE", HTTP),
    Option("public-models", FLAG, SERVE,
           "answer /v1/models without a key", False, "", HTTP),
    Option("show-model-path", FLAG, SERVE,
           "show in /props where the model lies", False, "", HTTP),
    Option("cors-origin", Each(TEXT), SERVE,
           "let web pages of this origin call, as https://chat.example; may be given several times",
           (), "URL", HTTP),
    Option("max-tokens", FROM_1, SERVE,
           "of a reply whose request sets none, as far as the context allows", 4096, "N", HTTP),
    Option("pooling", Choice(POOLINGS), SERVE,
           "of embeddings: the mean of all tokens, or the last one", "mean", "", HTTP),
    Option("max-body", SIZE, SERVE, "size of a request's body", 8 * 2**20, "SIZE", HTTP),
    Option("max-values", FROM_1, SERVE,
           "JSON values of a request, counted before parsing", 2**17, "N", HTTP),
    Option("max-messages", FROM_1, SERVE, "messages of a request", 1024, "N", HTTP),
    Option("max-choices", FROM_1, SERVE,
           "replies to a request: n, or n times the prompts", 128, "N", HTTP),
    Option("response-store", SIZE, SERVE,
           "memory for responses that clients may refer to later; 0: none are kept",
           64 * 2**20, "SIZE", HTTP),
    Option("lenient", FLAG, SERVE,
           "ignore unknown fields instead of refusing them", False, "", HTTP),
    Option("open", FLAG, SERVE, "open the web page in a browser", False, "", HTTP),
    # The audit log.
    Option("audit-log", PATH, SERVE,
           "write a line of JSON for every request", None, "FILE", AUDIT),
    Option("audit-text", FLAG, SERVE, "write prompts and answers too", False, "", AUDIT),
    Option("audit-max-bytes", SIZE, SERVE,
           "size at which a new file is begun; 0: never", 64 * 2**20, "SIZE", AUDIT),
    Option("log-format", Choice(("text", "json")), SERVE,
           "of the log, on standard error", "text", "", AUDIT),
)
# fmt: on
