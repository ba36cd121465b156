# SPDX-License-Identifier: Apache-2.0
"""All runs of a file, one after the other: predictions, and reasons where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan.check.predict import Prediction, predict
from autoplan.check.rows import NotExpressedError, Run
from autoplan.errors import AutoplanError

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Swept:
    """What became of every run.

    Attributes:
        predictions: Of those that could be priced.
        refused: (run, reason) of all others.
    """

    predictions: tuple[Prediction, ...]
    refused: tuple[tuple[Run, str], ...]


def sweep(runs: Sequence[Run], progress: Progress | None = None) -> Swept:
    """Predicts every run.

    Args:
        runs: From `read_runs`.
        progress: Called with (what, share done).
    """
    predictions: list[Prediction] = []
    refused: list[tuple[Run, str]] = []
    for number, run in enumerate(runs):
        if progress is not None:
            progress(run.prefix, number / len(runs))
        try:
            predictions.append(predict(run))
        except (NotExpressedError, AutoplanError) as reason:
            refused.append((run, str(reason)))
    return Swept(tuple(predictions), tuple(refused))
