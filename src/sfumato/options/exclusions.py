"""What does not go together, once: the checks, their messages and docs/exclusions.md.

A name is a field or an option as its place writes it: `Request` and `SamplerConfig`, the body of a
dialect, or the command line; "mode=causal" is one choice of a field, and "--url=none" that an
option is not given. A request that names a choice
and one that does not go with it is refused by `check`. Knows what is called what, and no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sfumato.refused import Refused


@dataclass(frozen=True)
class Exclusion:
    """A choice, and others that do not go with it.

    Texts may name {one}, the choice, {other}, the first of the others that is given, and {all} of
    those."""

    one: str
    others: tuple[str, ...]
    why: str
    advice: str = "leave one of them out"
    about: tuple[str, ...] = ("{other}",)  # the fields of the error, of which the first counts

    def refusal(self, given: Mapping[str, object]) -> Refused | None:
        """The error where both are given, which a name with a true value is."""
        wrong = [_field(other) for other in self.others if given.get(other)]
        if not (given.get(self.one) and wrong):
            return None
        words = {"one": _field(self.one), "other": wrong[0], "all": ", ".join(wrong)}
        fields = tuple(name.format(**words) for name in self.about)
        return Refused(fields, self.why.format(**words), self.advice.format(**words))


def _field(name: str) -> str:
    return name.split("=")[0]


def refusal(rows: Iterable[Exclusion], given: Mapping[str, object]) -> Refused | None:
    """The error of the first row that what is given breaks."""
    return next((each for row in rows if (each := row.refusal(given)) is not None), None)


def check(rows: Iterable[Exclusion], given: Mapping[str, object]) -> None:
    """Raises Refused where a row is broken."""
    if (refused := refusal(rows, given)) is not None:
        raise refused


_BOTH, _AND = ("{one}", "{other}"), ("{other}", "{one}")
_READS_ON = "which read from left to right"

CAUSAL = (
    Exclusion(
        "mode=causal",
        (
            *("max_steps", "sampler", "schedule", "stopping", "canvas_length", "soft_skip"),
            *("soft_top_k", "self_conditioning", "settle_at_end", "patience", "pace"),
        ),
        "causal replies have no canvases and no denoising steps",
        "leave out {all}",
        ("{one}",),
    ),
)
STOPPING = (
    Exclusion(
        "patience",
        ("settle_at_end",),
        "give at most one of them; both say which positions a canvas waits for",
        "",
        _BOTH,
    ),
)
SOFT = (
    Exclusion(
        "soft_skip",
        ("soft_top_k",),
        "give at most one of them; both say what self-conditioning may leave out",
        "",
        _BOTH,
    ),
)
NAMED = (
    Exclusion(
        "named_tokens",
        ("top_k", "top_p", "processors"),
        "log probabilities are of the model's own distribution",
        "leave out top_k, top_p, and processors that do more than ban tokens",
        ("{one}",),
    ),
)
GRAMMAR = (
    Exclusion(
        "grammar",
        ("mode=causal",),
        "a schema or grammar is held on canvases, and not in the mode causal",
    ),
    Exclusion(
        "grammar",
        ("stop", "canvas", "continued", "prediction", "ignore_eos", "named_tokens"),
        "does not go together with a schema or grammar, which alone says what the reply holds and "
        "where it ends",
    ),
)
REQUEST = (
    Exclusion(
        "ids", ("continued",), "belongs to messages or a prompt", "add its tokens to the ids"
    ),
    Exclusion("scoring", ("pooling",), "give at most one of them", "", _AND),
    Exclusion(
        "parts",
        (
            *("tools", "opening", "continued", "canvas", "prediction", "scoring", "pooling"),
            *("grammar", "verify"),
        ),
        "give at most one of them",
        "a fill has no {other}",
        _AND,
    ),
    Exclusion("parts", ("thinking",), "a text with holes is filled without a thought", "", _AND),
    Exclusion(
        "opening",
        ("canvas",),
        "give at most one of them; both say how a reply begins",
        "",
        _AND,
    ),
    Exclusion(
        "prediction",
        ("canvas",),
        "give at most one; both say how a canvas begins",
        "",
        _AND,
    ),
)
DECISION = (
    Exclusion(
        "order=schema",
        ("pictures",),
        "puts the state behind each question, and pictures are encoded once, before all of them",
        "leave the order out",
        _BOTH,
    ),
    Exclusion(
        "calibration", ("adapter",), "a calibration is of the model without adapters", about=_BOTH
    ),
    Exclusion(
        "joint",
        ("verify",),
        "the causal mode answers each question by itself, and not on one canvas with the others",
        about=_BOTH,
    ),
)
VERIFY = (
    Exclusion("mode=causal", ("verify",), "the causal mode has written the reply itself"),
    Exclusion(
        "verify=abstain",
        ("grammar",),
        "the other answer would match no schema and no grammar",
        "ask for a report, or leave one of them out",
        _BOTH,
    ),
)
PLAN = (
    Exclusion(
        "parts",
        ("mode=causal",),
        "a text with holes is filled on a canvas",
        "leave the mode out",
    ),
    Exclusion(
        "mode=causal", ("canvas",), "causal replies have no canvas", "leave it out, or the mode"
    ),
    Exclusion("mode=causal", ("prediction",), "causal replies have no canvas"),
    Exclusion(
        "thinking",
        ("prediction",),
        "says nothing of a thought, and the model thinks first here",
        "ask for no thinking, or leave the prediction out",
    ),
)
GIVEN_CANVAS = (
    Exclusion(
        "mode=causal",
        ("vllm_xargs",),
        "causal replies have no canvases",
        "leave vllm_xargs out",
        _AND,
    ),
    Exclusion(
        "diffusion_read_only",
        (
            *("temperature", "top_p", "top_k", "logit_bias", "min_tokens", "stop"),
            *("t_min", "t_max", "stability", "confidence", "settle_at_end", "patience"),
        ),
        "a read (diffusion_read_only) has the probabilities of the model at temperature 1",
        "leave the field out",
    ),
    Exclusion(
        "tool_choice", ("canvas",), "a given canvas cannot begin with a call", about=("{one}",)
    ),
)
COMPLETION = (
    Exclusion(
        "echo",
        ("grammar",),
        "the reply is written in the mode causal, which holds no schema and no grammar",
        about=("{one}",),
    ),
    Exclusion(
        "echo",
        ("mode=canvas",),
        "the reply is written in the mode causal",
        "leave mode out",
        _AND,
    ),
    Exclusion(
        "echo",
        ("logprob_token_ids",),
        "the most probable tokens alone are named",
        "leave logprob_token_ids out",
        _AND,
    ),
    Exclusion("stream", ("prompt_logprobs",), "only without stream", ""),
)
SUFFIX = (
    Exclusion(
        "suffix", ("canvas",), "does not go with a given canvas", "leave one out", ("{one}",)
    ),
    Exclusion(
        "suffix",
        ("echo", "prompt_logprobs", "mode=causal"),
        f"does not go with echo, prompt_logprobs and the mode causal, {_READS_ON}",
        "leave them out",
        ("{one}",),
    ),
    Exclusion(
        "suffix",
        ("min_tokens", "ignore_eos", "settle_at_end", "max_thinking_tokens", "verify"),
        "text before a suffix ends where the suffix begins",
        "leave the field out",
    ),
    Exclusion(
        "suffix",
        ("grammar",),
        "does not go together with a schema or grammar",
        about=("{one}",),
    ),
)
FILL = (
    Exclusion(
        "parts",
        ("stop", "min_tokens", "ignore_eos", "settle_at_end", "max_thinking_tokens", "verify"),
        "a fill has the length that its holes have",
        "",
    ),
    Exclusion("messages", ("prompt",), "give at most one of them", "", _AND),
    Exclusion("parts", ("grammar",), "does not go together with holes", "give a hole choices"),
)
OLLAMA = (
    Exclusion(
        "system",
        ("raw", "suffix"),
        "goes neither with raw nor with suffix",
        "put the text into prompt",
        ("{one}",),
    ),
    Exclusion("suffix", ("format", "logprobs"), "does not go together with suffix", ""),
)
LOCAL = (
    *("--random-weights", "--format", "--layers", "--device", "--dtype", "--activations"),
    *("--quantize", "--cache-type", "--predict", "--context", "--threads", "--fixed-steps"),
    *("--soft-skip", "--soft-top-k", "--where"),
)
"""Options of `sfumato bench` that have no meaning for a server."""

REMOTE = ("--api-key", "--drafts")
"""Options that have none for a model on this machine."""

BENCH = (
    Exclusion("--url", LOCAL, "is for measuring this machine, not for a server", "leave it out"),
    Exclusion("--url=none", REMOTE, "is for measuring a server, with --url", "leave it out"),
    Exclusion("--random-weights=none", ("--format", "--layers"), "belongs to --random-weights", ""),
    Exclusion(
        "--random-weights",
        ("--quantize",),
        "random weights are made in the format of --format",
        "",
    ),
    Exclusion(
        "--random-weights",
        ("-m", "--prompts"),
        "does not go with {other}: there is no text to read",
        "",
        ("{one}",),
    ),
    Exclusion("--prompts", ("--prompt-tokens",), "give at most one of them", "", _BOTH),
)
EVAL = (
    Exclusion(
        "--curves", ("--steps",), "give at most one of them; both say how many steps", "", _BOTH
    ),
)
FILL_AT = (Exclusion("--tokens", ("--at-most",), "give at most one of them", "", _BOTH),)

EXCLUSIONS: Mapping[str, tuple[Exclusion, ...]] = {
    "How a reply is decoded": (*CAUSAL, *STOPPING, *SOFT, *NAMED),
    "A schema or grammar": GRAMMAR,
    "A request": (*REQUEST, *VERIFY, *PLAN),
    "A decision": DECISION,
    "A canvas that the client gives (`vllm_xargs`)": GIVEN_CANVAS,
    "Text completions": COMPLETION,
    "A suffix": SUFFIX,
    "`/v1/fill`": FILL,
    "Ollama's `/api/generate`": OLLAMA,
    "`sfumato bench`": BENCH,
    "`sfumato eval`": EVAL,
    "`sfumato fill`": FILL_AT,
}
"""All rows, under the headings of docs/exclusions.md."""
