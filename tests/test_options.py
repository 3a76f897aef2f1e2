from __future__ import annotations

import subprocess
import sys
from collections import Counter

from sfumato.cli.commands import COMMANDS
from sfumato.diffusion import config
from sfumato.model.placement import DTYPES as PLACED
from sfumato.options import DTYPES, MOST_STEPS, MOST_TOP_K, OPTIONS
from sfumato.values import Flag


def test_an_option_of_a_command_has_one_row() -> None:
    counts = Counter((option.name, name) for option in OPTIONS for name in option.commands)
    assert [pair for pair, count in counts.items() if count > 1] == []
    assert {name for _, name in counts} <= {command.name for command in COMMANDS}


def test_what_turns_a_flag_off_is_no_other_option() -> None:
    flags = {option.flag for option in OPTIONS}
    assert [o.off for o in OPTIONS if isinstance(o.kind, Flag) and o.off in flags] == []


def test_every_default_is_a_value_of_its_kind() -> None:
    for option in OPTIONS:
        if option.shown_default:
            value = option.default
            expected = list(value) if isinstance(value, tuple) else value
            assert option.kind.parse(option.shown_default) == expected
        assert option.help and option.help == option.help.strip()
        assert "%" not in option.help


def test_every_command_takes_a_file_of_options() -> None:
    (config,) = [option for option in OPTIONS if option.name == "config"]
    assert {*config.commands, "completion"} == {command.name for command in COMMANDS}


def test_names_written_out_are_those_of_the_loader() -> None:
    assert ("auto", *PLACED) == DTYPES
    assert (MOST_STEPS, MOST_TOP_K) == (config.MOST_STEPS, config.MOST_TOP_K)


def test_the_table_loads_nothing_heavy() -> None:
    code = "import sys, sfumato.options; assert not {'torch', 'numpy', 'pydantic'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
