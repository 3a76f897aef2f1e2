from __future__ import annotations

import pytest
import torch

from sfumato.weights.files import tensorfile
from sfumato.weights.files.tensorfile import TensorStream, recoded
from sfumato.weights.formats import FORMATS, of_files, quantize

VALUES = torch.linspace(-1, 1, 4 * 512).view(4, 512)


def _joined(value, format: str) -> torch.Tensor:
    return torch.cat(list(recoded(value, format)))


@pytest.mark.parametrize("chunk", [512, 1 << 22])
@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_recoding(format: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces, the bytes are those of the whole; from floats and from blocks."""
    monkeypatch.setattr(tensorfile, "_CHUNK", chunk)
    coarse = quantize(VALUES, FORMATS["Q5_0"])
    for source, values in ((VALUES, VALUES), (coarse, coarse.dequantize())):
        if format in of_files("blocks"):
            expected = quantize(values, FORMATS[format]).data
        else:
            expected = values.to(FORMATS[format].dtype).view(torch.uint8)
        result = _joined(source, format)
        assert torch.equal(result, expected.flatten())
        assert len(result) == TensorStream.of("x", source, format).nbytes


def test_blocks_of_the_same_format_are_copied() -> None:
    blocks = quantize(VALUES, FORMATS["Q4_K"])
    assert torch.equal(_joined(blocks, "Q4_K"), blocks.data.flatten())


def test_float16_that_would_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="too large for float16"):
        _joined(torch.tensor([[1.0, 1e6]]), "F16")
