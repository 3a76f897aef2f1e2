"""Bounds of the numbers that users and clients give. Knows nothing of what the numbers do."""

from __future__ import annotations

MOST_LAYERS = 1024  # of a model: the largest that are published have some hundred
MOST_TOKENS = 2**24  # in any count of tokens or positions: more than any context holds
MOST_STEPS = 4096  # many times what any canvas needs: a schedule is asked for every one beforehand
MOST_STABILITY = 64  # steps; a canvas that has been the same for a few does not change any more
MOST_NATS = 10**6  # of any entropy: far more than a whole canvas has; float32 ends at 3e38
MIN_TEMPERATURE = 1e-6  # scores over a lower temperature would leave float32's range
MAX_TEMPERATURE = 10**6  # the distribution is flat long before, and float32 ends at 3e38
MOST_TOP_K = 1024  # tokens that a position is drawn from
MOST_COUNTED = 2048  # of soft_top_k: rows of the embedding that are gathered for each position
MOST_COUNTED_REQUEST = 256  # of a request: they are gathered in a step that all requests share
MOST_TOP = 20  # tokens that a step names at each position, as OpenAI's API has them
MOST_HISTORY = 256  # rows that a sampler or a stopping rule may look back over
MOST_SECONDS = 10**9  # in any time limit: 31 years
MOST_THREADS = 1024  # far more crash OpenMP
LAST_SEED = 2**64 - 1  # the random numbers take 64 bits of it
FIRST_SEED = -(2**63)  # of a request: OpenAI's API has negative seeds
MOST_STOPS, LONGEST_STOP = 16, 256  # stop texts of a request, and characters of one of them
MOST_BIASES, MOST_BIAS = 1024, 100  # token ids of a logit_bias, and what is added to a score
MOST_READS = 4_096  # questions times samples times orders of options, of one decision
AUTO_SAMPLES = 4  # of a question whose first sample is unsure, where "auto" is wanted
MOST_READ_STEPS = 8  # denoising steps of a question's canvas
MOST_HOLES = 256  # of a text: each is a token of a canvas or more
MOST_VARYING = 16  # of these, holes of an open length or with choices: each takes rounds of trials
MOST_CHOICES = 64  # texts that a hole may be filled with: each is a row that is scored
TRIALS = 8  # lengths of a hole, or choices, that are tried in one batch
STRENGTH = 0.5  # share of a predicted text that begins as noise, where nothing else is asked for

MOST_RANK = 1024
"""The largest rank of an adapter. Ranks of tuned models are 4 to 256; factors of more are as large
as what they change."""
MOST_ALPHA = 10**6  # of an adapter: less than that
LONGEST_NAME = 200  # characters of a model's or an adapter's name


def name_fault(name: object) -> str | None:
    """Why clients cannot call a model or an adapter so; None where they can."""
    if not isinstance(name, str) or not name or not name.isprintable() or set(name) & set(" ,"):
        return "is no name of a model: use printable characters without spaces and commas"
    if len(name) > LONGEST_NAME:
        return f"has {len(name):,} characters, and {LONGEST_NAME} are the most"
    return None
