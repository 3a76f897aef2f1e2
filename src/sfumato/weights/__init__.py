"""Bytes to tensors: opens checkpoint files and names what they hold; knows no layers."""
