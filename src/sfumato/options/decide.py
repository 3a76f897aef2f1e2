"""The options of `sfumato decide` and `sfumato calibrate`, but for those that load a model."""

from __future__ import annotations

from sfumato.options.kinds import CALIBRATE, DECIDE, FLAG, PATH, READS, SEED, TEXT
from sfumato.options.limits import MOST_READ_STEPS, MOST_READS
from sfumato.options.option import Option
from sfumato.values import Choice, Whole, WholeOr

_BOTH = (*DECIDE, *CALIBRATE)
_SAMPLES = WholeOr(Whole(1, MOST_READS), "auto")
_ORDER = Choice(("state", "schema"))

# A row is a line or two; the formatter would make it nine.
# fmt: off
DECIDING = (
    # Name, kind, commands, help, default, metavar, group.
    Option("questions", PATH, _BOTH,
           "TOML file of questions; docs/decisions.md", metavar="FILE", short="q", required=True),
    Option("state", TEXT, DECIDE,
           "decide about this text, and not about a table; - is standard input", metavar="TEXT"),
    Option("out", PATH, DECIDE,
           "CSV, TSV or JSON Lines file for the answers; one that is not complete is taken up",
           metavar="FILE", short="o"),
    Option("force", FLAG, DECIDE, "replace the file of answers", False),
    Option("probabilities", FLAG, DECIDE, "write the probability of every option too", False),
    Option("calibration", TEXT, DECIDE,
           "temperatures of `sfumato calibrate`, by name or file", None, "NAME"),
    Option("labelled", PATH, CALIBRATE,
           "table with a column of labels for each question", metavar="FILE", required=True),
    Option("name", TEXT, CALIBRATE, "of the calibration", "default", "NAME"),
    Option("folds", Whole(2, 20), CALIBRATE, "parts of the labels, each held out once", 5, "N"),
    Option("force", FLAG, CALIBRATE, "replace the calibration of that name", False),
    Option("samples", _SAMPLES, _BOTH,
           "reads of different noise, averaged; auto: more where one is unsure", 1, "N", READS),
    Option("orders", Whole(1, MOST_READS), _BOTH,
           "orders of the options, averaged", 1, "N", READS),
    Option("order", _ORDER, _BOTH,
           "the state first, or, for schema, each question before it", "state", "", READS),
    Option("steps", Whole(1, MOST_READ_STEPS), _BOTH, "denoising steps of a read", 1, "N", READS),
    Option("joint", FLAG, _BOTH, "read all questions in one canvas", False, "", READS),
    Option("no-label-mass", FLAG, DECIDE,
           "score the labels alone, which is faster", False, "", READS),
    Option("seed", SEED, DECIDE, "of the noise, 0 to 2^64-1", 0, "N", READS),
    Option("seed", SEED, CALIBRATE, "of the noise and the folds, 0 to 2^64-1", 0, "N", READS),
    Option("concurrency", Whole(1, 256), _BOTH, "rows at a time", 4, "N", READS),
)
# fmt: on
