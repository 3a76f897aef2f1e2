"""What devices can do at most: bytes and operations a second, measured or published.

No program reaches a published rate: of one, a device is taken to reach the same share as a large
copy and a large product reached on the one device where both are known.  Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.refused import Refused

COPY_SHARE, PRODUCT_SHARE = 0.90, 0.80
"""Of the published rates, what a large copy (4.3 of 4.8 TB/s) and a large bfloat16 product of
random numbers (788 of 990 TFLOP/s) reached on an H200 with torch 2.11."""
CODES_SHARE = 0.71
"""Of the published rates of products of codes: 1,400 of 1,979 TFLOP/s on an H200. Assumed, for
no device has been measured."""


@dataclass(frozen=True)
class DeviceLimits:
    """The highest rates of a device, as large copies and products reach them."""

    name: str
    bytes_per_s: float  # a copy in the device's memory, bytes read and bytes written counted
    bf16_flops: float  # a dense bfloat16 product that adds in float32
    fp8_flops: float  # of e4m3 codes; that of bfloat16 where kernels widen them for want of units
    int8_flops: float
    float32_flops: float  # outside of the units for products of bfloat16 and of tf32
    cache: float  # bytes of the last cache before the device's memory
    memory: float  # bytes
    measured: bool  # on such a device; False: from published rates
    source: str

    @classmethod
    def published(
        cls,
        name: str,
        terabytes: float,
        bf16: float,
        codes: tuple[float, float],
        float32: float,
        cache_mb: float,
        gigabytes: float,
        source: str,
    ) -> DeviceLimits:
        """From a data sheet: TB/s, TFLOP/s without sparsity, MB of cache, GB of memory. codes:
        TFLOP/s of FP8, sums in float32, and of INT8; 0 where these are no faster."""
        products = bf16 * 1e12 * PRODUCT_SHARE
        fp8, int8 = (max(products, rate * 1e12 * CODES_SHARE) for rate in codes)
        return cls(
            name,
            terabytes * 1e12 * COPY_SHARE,
            products,
            fp8,
            int8,
            float32 * 1e12 * PRODUCT_SHARE,
            cache_mb * 1e6,
            gigabytes * 1e9,
            False,
            source,
        )


_published = DeviceLimits.published
_SHEET = "data sheet"
_LIMITS = (
    DeviceLimits(
        "h200", 4.3e12, 790e12, 1400e12, 1400e12, 0.8 * 67e12, 60e6, 150.7e9, True,
        "copy of 8.6 GB and a product of side 8192 of random numbers, torch 2.11, driver 580; "
        "float32 from the data sheet, FP8 and INT8 assumed",
    ),
    _published("h100", 3.35, 990, (1979, 1979), 67, 50, 85.9, f"{_SHEET}, SXM"),
    _published("b200", 8.0, 2250, (4500, 4500), 75, 126, 192, f"{_SHEET}, SXM"),
    _published("a100", 2.04, 312, (0, 624), 19.5, 40, 85.9, f"{_SHEET}, SXM 80 GB"),
    _published("l4", 0.30, 121, (242, 242), 30.3, 48, 24, _SHEET),
    _published(
        "rtx-pro-6000", 1.79, 503.8, (1007.6, 1007.6), 126, 128, 103,
        f"{_SHEET}, Blackwell, workstation",
    ),
    _published("rtx-5090", 1.79, 209.5, (419, 838), 104.8, 96, 34.2, _SHEET),
    _published("rtx-4090", 1.01, 165.2, (330.3, 660.6), 82.6, 72, 25.8, _SHEET),
    _published("rtx-3090", 0.936, 71, (0, 284), 35.6, 6, 25.8, _SHEET),
    _published("rtx-3060", 0.36, 25.5, (0, 102), 12.7, 3, 12.9, f"{_SHEET}, 12 GB"),
    _published("arc-b70", 0.608, 183.5, (0, 367), 22.9, 32, 34.4, f"{_SHEET}; half of int8"),
    _published("strix-halo", 0.256, 59.4, (0, 0), 14.8, 32, 103, f"{_SHEET}, 96 GB for the GPU"),
    _published("mi300x", 5.3, 1307, (0, 2615), 163.4, 256, 206, _SHEET),
)  # fmt: skip
LIMITS = {limits.name: limits for limits in _LIMITS}
"""The devices that are known by name."""


def limits_named(name: str) -> DeviceLimits:
    """Raises ValueError, naming the known ones, for another name."""
    if name not in LIMITS:
        raise Refused("predict", f"{name!r} is none of {', '.join(LIMITS)}")
    return LIMITS[name]


def limits_of_product(product: str) -> DeviceLimits | None:
    """The limits of a device by the name that its driver gives ("NVIDIA H200"); None: unknown.

    A product whose name says more than the table's does (as "H100 PCIe") is another one.
    """
    plain = {"nvidia", "amd", "geforce", "instinct", "hbm3", "sxm", "80gb", "sxm4", "blackwell"}
    plain |= {"workstation", "edition", "oam"}
    words = [word for word in product.lower().replace("-", " ").split() if word not in plain]
    return LIMITS.get("-".join(words))
