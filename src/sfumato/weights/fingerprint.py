"""A short name for the weights of a checkpoint, which retraining changes. Knows no model."""

from __future__ import annotations

import hashlib

from sfumato.weights.checkpoint import Checkpoint

_SAMPLE = 64  # bytes of each tensor, at its begin and from its middle


def fingerprint(checkpoint: Checkpoint) -> str:
    """16 hex digits of a SHA-256 over the files' sizes, the tensors' names, shapes and formats, and
    a few bytes of every tensor: milliseconds, whatever the size. Names of files do not count."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.files):
        file = checkpoint.files[path]
        digest.update(str(len(file.mapping)).encode())
        for name in sorted(file.tensors):
            info = file.tensors[name]
            digest.update(repr((name, info.shape, info.format, info.offset)).encode())
            for start in (info.offset, info.offset + info.nbytes // 2):
                stop = min(start + _SAMPLE, info.offset + info.nbytes)
                digest.update(file.mapping[start:stop])
    return digest.hexdigest()[:16]
