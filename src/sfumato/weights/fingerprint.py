"""A short name for the weights of a checkpoint, which retraining changes. Knows no model."""

from __future__ import annotations

import hashlib

from sfumato.weights.checkpoint import Checkpoint

_SAMPLE = 64  # bytes of each tensor, at its begin and from its middle
_SAMPLED = 2048  # tensors: each costs a read of the disk, and experts saved one by one are many


def fingerprint(checkpoint: Checkpoint) -> str:
    """16 hex digits of a SHA-256 over the files' sizes, the tensors' names, shapes and formats, and
    a few bytes of every tensor, or of some thousands of them where there are more: milliseconds,
    whatever the size. Names of files do not count."""
    digest = hashlib.sha256()
    tensors = sum(len(file.tensors) for file in checkpoint.files.values())
    every, number = 1 + tensors // _SAMPLED, 0
    for path in sorted(checkpoint.files):
        file = checkpoint.files[path]
        digest.update(str(len(file.mapping)).encode())
        for name in sorted(file.tensors):
            info = file.tensors[name]
            digest.update(repr((name, info.shape, info.format, info.offset)).encode())
            number += 1
            if number % every:
                continue
            for start in (info.offset, info.offset + info.nbytes // 2):
                stop = min(start + _SAMPLE, info.offset + info.nbytes)
                digest.update(file.mapping[start:stop])
    return digest.hexdigest()[:16]
