"""Published narrow weights in safetensors files: FP8, INT8, INT4 and NVFP4.

`config.py` reads what a checkpoint says of them, `join.py` finds the pieces of each matrix among
the tensors, `matrix.py` holds one matrix, and `narrow_checkpoint.py` gives all of them under
canonical names. Knows bytes and no tensor's meaning.
"""

from sfumato.weights.narrow.config import Scheme, read_scheme

__all__ = ["Scheme", "read_scheme"]
