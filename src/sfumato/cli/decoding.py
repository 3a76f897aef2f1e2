"""From the options of a command to the settings of decoding, as the table of settings names them.

Knows no setting by name but `soft_top_k`, whose value is an object in Python; loads no torch for a
command that does not use it.
"""

from __future__ import annotations

import argparse
from typing import Any

from sfumato.options import DENOISING, setting


def sampler_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `SamplerConfig.options` takes, of the options that the command has."""
    given = vars(args)
    rows = [(each.name, each.option.replace("-", "_")) for each in DENOISING if each.option]
    values = {name: given[key] for name, key in rows if key in given}
    if counts := values.get("soft_top_k"):
        from sfumato import SoftTopK

        values["soft_top_k"] = SoftTopK(*counts)
    return values


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The same as fields of an HTTP body; what is not set is left out."""
    values = {setting(name).request_field: value for name, value in sampler_options(args).items()}
    return {k: v for k, v in values.items() if v is not None and v is not False}
