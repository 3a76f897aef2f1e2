"""Every choice of how a reply is decoded, once: name, values, default, one line of help.

Python (`SamplerConfig`, `Request` and the parts that they hold), the command line, the HTTP body
and the tables in docs/ derive from this table, or a test holds them against it. Knows what a choice
is called and which values it takes, and not what it does; imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sfumato.options.limits import (
    FIRST_SEED,
    LAST_SEED,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    MOST_BIAS,
    MOST_BIASES,
    MOST_COUNTED,
    MOST_COUNTED_REQUEST,
    MOST_NATS,
    MOST_SECONDS,
    MOST_STABILITY,
    MOST_STEPS,
    MOST_TOKENS,
    MOST_TOP,
    MOST_TOP_K,
)
from sfumato.values import Biases, Choice, Each, Flag, Kind, Number, OneOrTwo, Text, Whole

MODES = ("canvas", "causal")
"""How a reply is written: canvas by canvas, or one token after another."""

POOLINGS = ("mean", "last")
"""How the states of tokens become one embedding."""

VERIFICATIONS = ("report", "abstain")
"""What the causal mode is asked of a reply that canvases have written."""

SAMPLERS = ("entropy-bound", "fixed-count", "threshold", "low-confidence", "sequential")
"""Names of the samplers; diffusion/sampler.py has a class for each, and needs torch. The last two
are for models with a mask token."""

PACES = ("even", "linear")
"""Names of the paces, likewise."""


@dataclass(frozen=True)
class Setting:
    """One choice of how a reply is decoded."""

    name: str  # in Python: soft_top_k
    kind: Kind  # its values
    help: str
    default: Any = None  # where neither the user nor the checkpoint says; None: it does nothing
    sampler: str = ""  # the sampler that it belongs to, or several with commas; empty: every one
    option: str = ""  # its name on the command line, without dashes; empty: it has none
    field: str | None = None  # its name in an HTTP body; None: as in Python; empty: it has none
    field_kind: Kind | None = None  # its values there, where they differ

    @property
    def samplers(self) -> tuple[str, ...]:
        """The samplers that the setting belongs to; empty: every one."""
        return tuple(self.sampler.split(", ")) if self.sampler else ()

    @property
    def request_field(self) -> str:
        """The name of the setting in an HTTP body; empty: it has none."""
        return self.name if self.field is None else self.field

    @property
    def request_kind(self) -> Kind:
        """The kind of the setting's values in an HTTP body."""
        return self.field_kind or self.kind


_TOKENS, _SHARE, _FLAG = Whole(0, MOST_TOKENS), Number(0, 1), Flag()
_COUNTED = (
    "draw from, and self-condition on, the K most probable tokens; with K2, K at the first step "
    "and K2, which may be greater, at the last; entropy stays that of all"
)
_OR_ALL = Whole(-(2**63), MOST_TOP_K)  # 0 and less: all

# A row is a line or two; the formatter would make it nine.
# fmt: off
DENOISING = (
    # Fields of SamplerConfig and of its parts. Name, kind, help, default, sampler, option, field.
    Setting("mode", Choice(MODES), "canvas, or causal: one token after another", "canvas", "",
            "mode"),
    Setting("max_steps", Whole(1, MOST_STEPS), "denoising steps per canvas at most", 48, "",
            "steps"),
    Setting("sampler", Choice(SAMPLERS), "which drawn tokens a step accepts", "entropy-bound", "",
            "sampler"),
    Setting("entropy_bound", Number(0, MOST_NATS), "summed entropy of what a step accepts, in nats",
            0.1, "entropy-bound", "entropy-bound"),
    Setting("count", Whole(1, MOST_TOKENS), "positions that a step accepts", 8, "fixed-count"),
    Setting("threshold", _SHARE, "probability from which a position is accepted", 0.9,
            "threshold, low-confidence", "threshold"),
    Setting("margin", _SHARE, "lead over the second token from which a position is accepted", 1.0,
            "threshold"),
    Setting("pace", Choice(PACES), "how a canvas's mask tokens are shared among its steps", "even",
            "low-confidence, sequential", "pace"),
    Setting("t_min", Number(0, MAX_TEMPERATURE), "temperature that the schedule falls towards",
            0.4),
    Setting("t_max", Number(MIN_TEMPERATURE, MAX_TEMPERATURE), "temperature of the first step",
            0.8),
    Setting("temperature", Number(0, MAX_TEMPERATURE), "scales the temperature schedule", 1.0, "",
            "temperature"),
    Setting("stability", Whole(0, MOST_STABILITY), "steps that a settled canvas stays the same", 1),
    Setting("confidence", Number(0, MOST_NATS, (0,)), "mean nats under which a canvas has settled",
            0.005),
    Setting("settle_at_end", _FLAG, "a canvas has settled once it has up to its end token", False,
            "", "settle-at-end"),
    Setting("patience", Whole(1, MOST_STABILITY),
            "each position settles by itself: it is sure, or the same for N steps", None, "",
            "patience"),
    Setting("top_k", Whole(1, MOST_TOP_K), "draw from the K most probable tokens", None, "",
            "top-k", None, _OR_ALL),
    Setting("top_p", Number(0, 1, (0,)), "draw from the most probable share P", None, "", "top-p",
            None, _SHARE),
    Setting("logit_bias", Biases(MOST_BIASES, MOST_BIAS), "added to the scores of tokens, by id"),
    Setting("canvas_length", Whole(1, MOST_TOKENS), "tokens of a canvas"),
    Setting("self_conditioning", _FLAG, "false measures what self-conditioning is worth", True),
    Setting("soft_skip", Number(0, 1, (1,)),
            "self-conditioning may leave out this probability; 0: exact", None, "", "soft-skip"),
    Setting("soft_top_k", OneOrTwo(Whole(1, MOST_COUNTED)), _COUNTED, None, "", "soft-top-k", None,
            Whole(1, MOST_COUNTED_REQUEST)),
    Setting("min_tokens", _TOKENS, "no end token before N tokens", 0, "", "min-tokens"),
    Setting("ignore_eos", _FLAG, "end tokens do not end a reply", False, "", "ignore-eos"),
    Setting("top_tokens", Whole(0, MOST_TOP), "most probable tokens that a step names", None, "",
            "", "top_logprobs"),
)

REPLY = (
    # Fields of Request.
    Setting("max_tokens", Whole(1, MOST_TOKENS), "length limit", 256, "", "max-tokens", None,
            Whole(-1, MOST_TOKENS)),
    Setting("stop", Each(Text()), "end before this text", (), "", "stop"),
    Setting("seed", Whole(0, LAST_SEED), "random seed, 0 to 2^64-1", 0, "", "seed", None,
            Whole(FIRST_SEED, LAST_SEED)),
    Setting("thinking", _FLAG, "let the model think before it answers", False, "", "thinking", ""),
    Setting("max_thinking_tokens", _TOKENS, "then a thought is closed and the answer begins"),
    Setting("retry_empty", _FLAG, "draw an empty answer again", True),
    Setting("verify", Choice(VERIFICATIONS), "let the causal mode read the reply: report what it "
            "doubts, or abstain too where it doubts a short answer", None, "", "verify"),
    Setting("timeout_s", Number(0, MOST_SECONDS, (0,)), "seconds until a request fails", None, "",
            "", "timeout"),
    Setting("drafts", _FLAG, "send the draft of every step", False, "", "", "stream_drafts"),
)
# fmt: on

SETTINGS = (*DENOISING, *REPLY)


@cache
def setting(name: str) -> Setting:
    """The setting of that name in Python, which there is."""
    return next(each for each in SETTINGS if each.name == name)


def default(name: str) -> Any:
    """What a setting is where neither the user nor the checkpoint says."""
    return setting(name).default


def bounds(name: str) -> tuple[Any, Any]:
    """The least and the greatest value of a setting that is a number; `setting(name).kind` says
    whether they are values themselves."""
    kind = setting(name).kind
    assert isinstance(kind, Whole | Number)
    return kind.low, kind.high
