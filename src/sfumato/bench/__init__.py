"""Measuring: this machine with a checkpoint or random weights, any OpenAI-compatible server, and
how good a model is at tasks.

Every figure is defined once, in `metrics`; docs/benchmarking.md says how to use them.
"""
