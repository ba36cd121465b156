# SPDX-License-Identifier: Apache-2.0
"""From timings to the two-parameter curves of a profile.

A curve e(x) = share * x / (x + half) makes seconds a straight line in x, so a fit is one of a line:
by least squares of relative errors, so that small and large points count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed_s + x / rate, never negative in either part.

    Attributes:
        fixed_s: At x = 0.
        rate: x per second for large x.
        error: Mean of |fitted / measured - 1| over the points.
    """

    fixed_s: float
    rate: float
    error: float

    @property
    def half(self) -> float:
        """x at which half of the rate is reached."""
        return self.fixed_s * self.rate


def fit_line(points: list[tuple[float, float]]) -> Line:
    """The line through (x, seconds) with the least sum of squared relative errors.

    Where that line would cross below 0, the one through the origin; where it would fall, the
    constant.

    Args:
        points: At least one; x >= 0, seconds > 0, some x > 0.

    Raises:
        ValueError: There is no such point.
    """
    x = np.array([p[0] for p in points], dtype=np.float64)
    t = np.array([p[1] for p in points], dtype=np.float64)
    if not len(points) or not (t > 0.0).all() or not (x > 0.0).any():
        raise ValueError(f"{len(points)} points give no line: give seconds > 0, some at x > 0")
    columns = np.stack([1.0 / t, x / t], axis=1)
    fixed, slope = np.linalg.lstsq(columns, np.ones_like(t), rcond=None)[0]
    if len(points) == 1 or fixed < 0.0:
        ratio = x / t
        fixed, slope = 0.0, ratio.sum() / (ratio * ratio).sum()
    if slope <= 0.0:  # a constant: as fast as the largest point at least
        fixed, slope = float(np.median(t)), float(1e-3 * (t / np.maximum(x, 1e-300)).min())
    error = float(np.abs((fixed + slope * x) / t - 1.0).mean())
    return Line(float(fixed), float(1.0 / slope), error)


def fit_terms(rows: Sequence[tuple[float, ...]], seconds: list[float]) -> tuple[list[float], float]:
    """Coefficients c >= 0 of seconds = sum of c_i * x_i with the least relative errors, and the
    mean of |fitted / measured - 1|.

    Args:
        rows: (x_0, x_1, ...) of each point; at least as many points as terms.
        seconds: Measured, > 0.

    Source: Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23; with so few terms
    all sets of active ones are tried.
    """
    x, t = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scaled, best, chosen = x / t[:, None], np.inf, np.zeros(x.shape[1])
    for active in range(1, 1 << x.shape[1]):
        columns = [i for i in range(x.shape[1]) if active >> i & 1]
        found = np.linalg.lstsq(scaled[:, columns], np.ones_like(t), rcond=None)[0]
        residual = float(((scaled[:, columns] @ found - 1.0) ** 2).sum())
        if (found >= 0.0).all() and residual < best:
            best, chosen = residual, np.zeros(x.shape[1])
            chosen[columns] = found
    error = float(np.abs(scaled @ chosen - 1.0).mean())
    return [float(c) for c in chosen], error


def rising(rows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(bytes, seconds) in the order of bytes, seconds never falling: more bytes are never faster,
    so a point that is slower than a larger one was disturbed and takes the larger one's time.
    """
    result: list[tuple[float, float]] = []
    least = float("inf")
    for size, seconds in sorted(rows, reverse=True):
        least = min(least, seconds)
        result.append((size, least))
    return result[::-1]
