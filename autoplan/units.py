# SPDX-License-Identifier: Apache-2.0
"""Units and their printing. Inside autoplan all is SI: seconds, bytes, bytes/s, FLOP/s; other units
exist in
profile files (whose keys name them) and on the screen."""

from __future__ import annotations

KB, MB, GB = 1e3, 1e6, 1e9
KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
US, MS = 1e-6, 1e-3
GFLOP, TFLOP, PFLOP = 1e9, 1e12, 1e15

DTYPE_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "tfloat32": 4,  # float32 in memory, rounded to 10 bits of mantissa for products
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
FLOATING = frozenset(
    {
        "float8_e4m3fn",
        "float8_e5m2",
        "float16",
        "bfloat16",
        "tfloat32",
        "float32",
        "float64",
        "complex64",
        "complex128",
    }
)


def format_bytes(size_bytes: float) -> str:
    """Bytes for people, in binary units: "3.2 GiB", "512 B"."""
    for unit, factor in (("TiB", 2.0**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(time_s: float) -> str:
    """Seconds for people: "18.4 ms", "412 us", "3.21 s"."""
    for unit, factor in (("s", 1.0), ("ms", MS), ("us", US)):
        if abs(time_s) >= factor:
            return f"{time_s / factor:.3g} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s else "0 s"


def format_count(number: float) -> str:
    """Counts for people, decimal: "70.6 B" parameters, "1.3 M"."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"
