"""Conversion: a checkpoint of one kind becomes one of the other, or one of another format."""

from sfumato.convert.conversion import DEFAULTS, HF_TARGETS, Converted, convert

__all__ = ["DEFAULTS", "HF_TARGETS", "Converted", "convert"]
