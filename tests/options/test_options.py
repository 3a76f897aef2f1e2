from __future__ import annotations

import subprocess
import sys
from collections import Counter

from sfumato.cli.arguments import COMMANDS
from sfumato.diffusion import sampler, sampler_config
from sfumato.diffusion.sampler import EntropyBound, FixedCount, Threshold
from sfumato.model.placement import DTYPES as PLACED
from sfumato.model.truncate import MOST_TOP_K
from sfumato.options import PACES, SAMPLERS, SETTINGS, bounds, default, limits
from sfumato.options.table import DTYPES, OPTIONS, options_of
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
    without = {"completion", "version", "help"}
    assert {*config.commands, *without} == {command.name for command in COMMANDS}


def test_names_written_out_are_those_of_the_loader() -> None:
    assert ("auto", *PLACED) == DTYPES


def test_a_setting_has_one_row_and_its_option_takes_the_same_values() -> None:
    assert not [n for n, count in Counter(s.name for s in SETTINGS).items() if count > 1]
    assert not [n for n, count in Counter(s.option for s in SETTINGS).items() if n and count > 1]
    for each in SETTINGS:
        rows = [row for row in options_of("run") if each.option and row.name == each.option]
        assert all(row.kind is each.kind and row.help.startswith(each.help) for row in rows)
        if each.default is not None:
            assert each.kind.describe() and each.kind.parse(each.kind.show(each.default)) == (
                list(each.default) if isinstance(each.default, tuple) else each.default
            )


def test_the_code_checks_the_bounds_of_the_table() -> None:
    bounds_of_code = {
        "max_steps": (1, limits.MOST_STEPS),
        "top_k": (1, MOST_TOP_K),
        "top_tokens": (0, limits.MOST_TOP),
        "stability": (0, limits.MOST_STABILITY),
        "confidence": (0, limits.MOST_NATS),
        "entropy_bound": (0, limits.MOST_NATS),
        "count": (1, limits.MOST_TOKENS),
        "canvas_length": (1, limits.MOST_TOKENS),
        "timeout_s": (0, limits.MOST_SECONDS),
    }
    assert bounds_of_code == {name: bounds(name) for name in bounds_of_code}
    assert sampler_config.MOST_HISTORY == limits.MOST_HISTORY
    assert {name for each in SETTINGS for name in each.samplers} == {*SAMPLERS}
    assert (*sampler.PACES,) == PACES and (*sampler.SAMPLERS,) == SAMPLERS


def test_the_defaults_of_the_parts_are_those_of_the_table() -> None:
    linear, stable = sampler.LinearTemperature(), sampler.StableAndConfident()
    assert (linear.t_min, linear.t_max) == (default("t_min"), default("t_max"))
    assert (stable.stability, stable.confidence) == (default("stability"), default("confidence"))
    assert (EntropyBound().bound, FixedCount().count) == (default("entropy_bound"), 8)
    assert (Threshold().top, Threshold().margin) == (default("threshold"), default("margin"))
    assert sampler_config.REFERENCE.max_steps == default("max_steps")
    chosen = sampler_config.SamplerConfig()
    for name in ("temperature", "min_tokens", "ignore_eos", "self_conditioning", "top_k"):
        assert getattr(chosen, name) == default(name)


def test_the_table_loads_nothing_heavy() -> None:
    code = "import sys, sfumato.options; assert not {'torch', 'numpy', 'pydantic'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
