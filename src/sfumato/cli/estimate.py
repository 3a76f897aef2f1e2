"""What a denoising step of DiffusionGemma 26B-A4B would take, from the speeds of its operations.

Knows no machine: the speeds are `probes.py`'s. Multiply-adds for each of 256 positions: 25 sliding
and 5 full layers with 8 of 128 experts (3.1e9), and the tied embedding twice, as head and as soft
embedding (1.5e9). So many positions reach nearly every expert, so that a step reads all weights
once. Compiled operations multiply the blocks; only the soft embedding dequantizes, and multiplies
floats. Without them all that a step reaches is dequantized: the layers (25e9 weights) once, the
embedding (0.74e9) up to three times: for the cutoffs of top-k and top-p, the statistics, the draw.
"""

from __future__ import annotations

from sfumato.cli.probes import CANVAS, Speed, dtype_name, quantized_dtype

EMBEDDING = 0.74e9
LAYERS_FLOP = 2 * CANVAS * 3.1e9
EXPERTS_FLOP = 2 * CANVAS * 1.4e9  # of the layers'
HEAD_FLOP = 2 * CANVAS * EMBEDDING
STEP_FLOP = LAYERS_FLOP + 2 * HEAD_FLOP
STEP_WEIGHTS = 25e9 + 3 * EMBEDDING
LAYER_EXTRA = 1.5
"""What else a layer does (attention, norms, rounding activations), over its products alone, as
`bench --where` finds for layers of the real size; between 1.4 and 1.7 on two machines."""

_BASE = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "safetensors": "BF16"}


def step_seconds(speed: Speed, device: str, format: str, nbytes: float) -> float:
    """One step of the model in that format, whose weights take so many bytes."""
    base = _BASE.get(format, format)
    reading = nbytes / speed["read_bytes"]
    if f"{base}_flops" not in speed:
        return _dense(speed, device, base, reading)
    ratio = speed["expert_flops"] / speed["Q4_K_flops"]
    layers = (LAYERS_FLOP - EXPERTS_FLOP + EXPERTS_FLOP / ratio) / speed[f"{base}_flops"]
    if base == "BF16":
        head = HEAD_FLOP / speed["BF16_flops"] + HEAD_FLOP / speed["bfloat16_flops"]
    else:
        output = base if base == "Q8_0" else "Q6_K"  # the embedding, in every K mix
        head = HEAD_FLOP / speed[f"{output}_flops"] + HEAD_FLOP / speed["float32_flops"]
        head += EMBEDDING / speed["dequantized_weights"]
    return LAYER_EXTRA * layers + head + reading


def _dense(speed: Speed, device: str, base: str, reading: float) -> float:
    """With torch's products alone."""
    if base == "BF16":
        return max(STEP_FLOP / speed["bfloat16_flops"], reading)
    floats = speed[f"{dtype_name(quantized_dtype(device))}_flops"]
    return STEP_WEIGHTS / speed["dequantized_weights"] + STEP_FLOP / floats


def least_seconds(speed: Speed, nbytes: float) -> float:
    """What any program would need: the greater of the arithmetic at the best speed, and reading
    the weights once."""
    flops = max(rate for name, rate in speed.items() if name.endswith("_flops"))
    return max(STEP_FLOP / flops, nbytes / speed["read_bytes"])
