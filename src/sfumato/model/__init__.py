"""The network: token ids and cache slots to hidden states and head statistics.

Knows no sampling, no requests and no files.
"""
