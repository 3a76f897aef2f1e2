"""Programs that take turns in benchmarks, and the comparison of blocks with a causal network."""

from __future__ import annotations

import sys

import pytest
from benchmarks.blocks_vs_llama_cpp import distance, figures
from benchmarks.turns import Contender, OtherWork, in_turns

COUNTS = """
import json, sys
for number, line in enumerate(sys.stdin):
    if line.strip() == "end":
        sys.exit(3)
    print(json.dumps([sys.argv[1], number]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_programs_take_turns_until_one_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with Contender(COUNTS, "a") as one, Contender(COUNTS, "b") as other:
        work = OtherWork([one, other])
        assert in_turns([one, other], 2) == [[[x, n] for n in range(3)] for x in "ab"]
        assert capsys.readouterr().err.splitlines()[-1] == "round 2 of 2"
        assert 0 <= work.share() <= 1 and one.seconds() >= 0
        with pytest.raises(SystemExit, match="exit code 3"):
            one.measure("end")


def test_blocks_are_compared_by_tokens_per_forward() -> None:
    """A token takes 100 ms, a step 150 and a commit 100, so that 300 of the 400 ms of 4 tokens are
    left for two steps."""
    block = {"prefill_s": 0.5, "step_s": [0.15], "commit_s": 0.1, "token_s": 0.1}
    ours, theirs = {"2": block, "1": block}, {"prefill_s": 1.0, "token_s": [0.1]}
    compared = figures([None, theirs], [None, ours], 4, 100)
    assert compared["break_even"] == pytest.approx(2)
    assert (compared["llama_prefill_tps"], compared["prefill_tps"]) == (100, 200)
    assert compared["paces"][2]["ratio"] == pytest.approx(1)
    assert compared["paces"][4]["of_rounds"] == [pytest.approx(1.6)]
    slower = {"2": block | {"commit_s": 0.5}}
    assert figures([None, theirs], [None, slower], 4, 100)["break_even"] is None
    assert distance([1, 2, 3], [3, 4, 5]) == 0
