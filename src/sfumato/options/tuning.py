"""Every choice of how a model is tuned, once: name, values, default, one line of help.

`train.tune.Tuning`, the command line and the table in docs/ derive from this table. Knows what a
choice is called and which values it takes, and not what it does; imports nothing heavy.
"""

from __future__ import annotations

from sfumato.options.limits import LAST_SEED, MOST_ALPHA, MOST_RANK, MOST_TOKENS
from sfumato.options.settings import Setting
from sfumato.values import Choice, Flag, Listed, Number, Whole

TARGETS = ("attention", "mlp", "self-conditioning", "experts", "router")
"""The parts of a network that an adapter may change."""
LONG = ("refuse", "cut", "skip")
"""What becomes of a row that has more tokens than a row may have."""

_STEPS, _ROWS, _RATE = Whole(1, 10**9), Whole(1, 4096), Number(0, 1, (0,))

# A row is a line or two; the formatter would make it nine.
# fmt: off
TUNING = (
    # Fields of Tuning. Name, kind, help, default.
    Setting("full", Flag(), "tune all weights, which must be floats, and no adapter", False),
    Setting("targets", Listed(Choice(TARGETS)), f"what an adapter changes: {', '.join(TARGETS)}",
            ("attention", "mlp", "self-conditioning")),
    Setting("rank", Whole(1, MOST_RANK), "rank of an adapter's changes", 16),
    Setting("alpha", Number(0, MOST_ALPHA, (0, MOST_ALPHA)), "an adapter's changes are scaled by "
            "alpha / rank", 32.0),
    Setting("context", Whole(2, MOST_TOKENS), "tokens of a row, its last canvas included, at most",
            1024),
    Setting("long", Choice(LONG), "of rows with more tokens: refuse; cut: leave out the end of the "
            "reply, by whole canvases; skip: leave out the row", "refuse"),
    Setting("replies_only", Flag(), "the encoder learns the tokens of replies, and not of prompts",
            False),
    Setting("encoder_weight", Number(0, 100), "weight of the encoder's loss, beside 1 of the "
            "canvas", 1.0),
    Setting("epochs", Number(0, 10**6, (0,)), "how many times each row comes", 3.0),
    Setting("steps", _STEPS, "steps, in place of --epochs"),
    Setting("batch", _ROWS, "rows of a step", 8),
    Setting("at_once", _ROWS, "rows that are computed together: a divisor of --batch", 1),
    Setting("rate", _RATE, "highest learning rate, after the warm-up", 1.5e-4),
    Setting("last_rate", Number(0, 1), "learning rate at the last step, along a cosine", 1.5e-5),
    Setting("warm_up", Whole(1, 10**6), "first steps, along which the rate rises; at most a tenth "
            "of all", 100),
    Setting("weight_decay", Number(0, 1), "of AdamW, on matrices", 1e-4),
    Setting("recompute", Flag(), "compute each layer again in the backward pass: less memory, "
            "more time", False),
    Setting("eval_every", _STEPS, "steps between two evaluations; default: a tenth of all"),
    Setting("patience", Whole(0, 10**6), "end after N evaluations without a lower loss; 0: never",
            5),
    Setting("samples", Whole(0, 64), "held-out prompts that each evaluation answers", 2),
    Setting("save_every", _STEPS, "steps between two checkpoints; default: a twentieth of all"),
    Setting("keep", Whole(1, 1000), "newest checkpoints that are kept", 3),
    Setting("seed", Whole(0, LAST_SEED), "random seed, 0 to 2^64-1", 0),
)
# fmt: on
