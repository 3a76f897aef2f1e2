"""Measuring: this machine with a checkpoint or random weights, or any OpenAI-compatible server.

Every figure is defined once, in `metrics`; docs/benchmarking.md says how to use them.
"""
