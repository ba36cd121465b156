# SPDX-License-Identifier: Apache-2.0
"""Predictions against measurements: tables, JSON and a drawing.

In: predictions and rows that could not be expressed. Out: figures per source and overall. MAPE is
the mean of |predicted / measured - 1|; bias the mean of its signed value; rank the mean Spearman
correlation over groups of the same model, GPUs and batch with four plans or more; "noise" the same
where plans that were measured within NOISE of each other may come in either order.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.accuracy import Checked, write_checked
from autoplan.check.predict import Prediction
from autoplan.check.rows import Run
from autoplan.check.sweep import Swept
from autoplan.units import GB, GIB

LEAST_GROUP = 4
NOISE = 0.02  # by which runs of one plan differ: the repeated rows of the sources


@dataclass(frozen=True)
class Accuracy:
    """Figures of one set of predictions; times and memory."""

    name: str
    count: int
    mape: float
    median: float
    worst_tenth: float
    bias: float
    rank: float | None
    rank_beyond_noise: float | None
    groups: int
    best_in_three: int
    memory_count: int
    memory_under: float
    memory_over: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {k: getattr(self, k) for k in self.__dataclass_fields__}


def accuracy_of(name: str, predictions: Iterable[Prediction]) -> Accuracy:
    """The figures of some predictions.

    Args:
        name: What they are.
        predictions: Rows without a measured time count for memory alone.
    """
    given = list(predictions)
    errors = [p.error for p in given if p.error is not None]
    sizes = sorted(abs(e) for e in errors)
    ranks, beyond, best = [], [], 0
    for group in _groups(given):
        a, b = [x for x, _ in group], [y for _, y in group]
        ranks.append(spearman(a, b))
        beyond.append(spearman(a, _in_noise(a, b)))
        quickest = min(range(len(group)), key=lambda i: b[i])
        best += sorted(range(len(group)), key=lambda i: a[i]).index(quickest) < 3
    memory = [e for p in given if (e := memory_error(p)) is not None]
    return Accuracy(
        name,
        len(errors),
        statistics.fmean(sizes) if sizes else 0.0,
        statistics.median(sizes) if sizes else 0.0,
        sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)] if sizes else 0.0,
        statistics.fmean(errors) if errors else 0.0,
        statistics.fmean(ranks) if ranks else None,
        statistics.fmean(beyond) if beyond else None,
        len(ranks),
        best,
        len(memory),
        min(memory, default=0.0),
        statistics.fmean(memory) if memory else 0.0,
    )


def memory_error(prediction: Prediction) -> float | None:
    """Predicted over measured peak, minus 1; None where none was measured, or the source does not
    state the microbatch, on which all activations depend. Where it does not state the unit, GB or
    GiB, what lies between the two is right, and beyond them the nearer one counts.
    """
    run = prediction.run
    measured = run.number("peak_memory_gb")
    known = run.cells["micro_batch_seqs"] or run.cells["grad_accum"]
    if measured is None or run.cells["status"] == "oom" or not known:
        return None
    binary = re.search(r"[GM]iB", run.text("notes"))
    decimal = re.search(r"memory in [GM]B", run.text("notes"))
    low = measured * (GIB if binary else GB)
    high = measured * (GB if decimal else GIB)
    return prediction.memory_bytes / min(max(prediction.memory_bytes, low), high) - 1.0


PLAN = (
    "tp", "pp", "vpp", "cp", "ep", "micro_batch_seqs", "sequence_parallel", "recompute",
)  # fmt: skip


def _groups(predictions: Sequence[Prediction]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) seconds per plan, for each model, GPUs and batch of a source that ran
    under LEAST_GROUP plans or more; runs of one plan are one, by their mean.
    """
    found: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]] = {}
    names = ("model", "gpu", "gpus", "seq_len", "precision", "global_batch_seqs", "task")
    for p in predictions:
        if p.measured_s is not None:
            key = (p.run.prefix, *(p.run.text(name) for name in names))
            plan = (*(p.run.text(name) for name in PLAN), _sharing(p.run))
            found.setdefault(key, {}).setdefault(plan, []).append((p.step_s, p.measured_s))
    return [
        [
            (statistics.fmean(a for a, _ in runs), statistics.fmean(b for _, b in runs))
            for runs in plans.values()
        ]
        for plans in found.values()
        if len(plans) >= LEAST_GROUP
    ]


def _sharing(run: Run) -> str:
    """What is sharded among which ranks: groups as large as all there are, are none."""
    text = run.text("fsdp_or_zero")
    return text.removesuffix(f" within groups of {run.text('dp')}")


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation; 1 where there is nothing to tell apart."""
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2.0
    over = sum((i - mean) * (j - mean) for i, j in zip(x, y))
    under = math.sqrt(sum((i - mean) ** 2 for i in x) * sum((j - mean) ** 2 for j in y))
    return over / under if under else 1.0


def _in_noise(predicted: list[float], measured: list[float]) -> list[float]:
    """Places of the measured values; of those within NOISE of the least of them, in the order of
    the predictions.
    """
    order = sorted(range(len(measured)), key=lambda i: measured[i])
    runs: list[list[int]] = []
    for i in order:
        if runs and measured[i] <= measured[runs[-1][0]] * (1.0 + NOISE):
            runs[-1].append(i)
        else:
            runs.append([i])
    places = [0.0] * len(measured)
    for place, i in enumerate(i for run in runs for i in sorted(run, key=lambda i: predicted[i])):
        places[i] = float(place)
    return places


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2.0 for v in values]


def by_source(predictions: Sequence[Prediction]) -> list[Accuracy]:
    """Per source, the reliable ones first, and all reliable ones together."""
    names = dict.fromkeys(p.run.prefix for p in predictions)
    tables = [accuracy_of(name, [p for p in predictions if p.run.prefix == name]) for name in names]
    return [*tables, accuracy_of("all", [p for p in predictions if p.run.scored])]


def render(swept: Swept, *, rows: bool = False) -> str:
    """The page that `autoplan check` prints."""
    predictions, refused = swept.predictions, swept.refused
    lines = [
        f"{'source':12} {'rows':>5} {'MAPE':>6} {'median':>7} {'p90':>6} {'bias':>7} {'rank':>5} "
        f"{'noise':>5} "
        f"{'groups':>6} {'top 3':>5} {'memory':>6} {'lowest':>7} {'mean':>7}"
    ]
    for a in by_source(predictions):
        rank = " " * 11
        if a.rank is not None and a.rank_beyond_noise is not None:
            rank = f"{a.rank:5.2f} {a.rank_beyond_noise:5.2f}"
        memory = (
            f"{a.memory_count:6d} {a.memory_under:+7.1%} {a.memory_over:+7.1%}"
            if a.memory_count
            else ""
        )
        lines.append(
            f"{a.name:12} {a.count:5d} {a.mape:6.1%} {a.median:7.1%} {a.worst_tenth:6.1%} "
            f"{a.bias:+7.1%} {rank} {a.groups:6d} {a.best_in_three:5d} {memory}".rstrip()
        )
    if rows:
        lines += ["", f"{'row':16} {'runtime':14} {'measured':>9} {'predicted':>9} {'error':>7}"]
        for p in predictions:
            measured = f"{p.measured_s:9.4g}" if p.measured_s else " " * 9
            error = f"{p.error:+7.1%}" if p.error is not None else ""
            lines.append(
                f"{p.run.id:16} {p.runtime:14} {measured} {p.step_s:9.4g} {error} "
                f"{', '.join(p.run.assumed)}".rstrip()
            )
    if refused:
        lines += ["", f"{len(refused)} rows are not expressed:"]
        reasons: dict[str, list[str]] = {}
        for run, reason in refused:
            reasons.setdefault(reason, []).append(run.id)
        for reason, ids in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(ids):5d} {reason}: {_shortened(ids)}")
    return "\n".join(lines) + "\n"


def _shortened(ids: list[str]) -> str:
    return ", ".join(ids[:6]) + (f" and {len(ids) - 6} more" if len(ids) > 6 else "")


def document(swept: Swept) -> dict[str, Any]:
    """Everything as plain data."""
    predictions, refused = swept.predictions, swept.refused
    return {
        "sources": [a.to_json() for a in by_source(predictions)],
        "rows": [
            {
                "id": p.run.id,
                "runtime": p.runtime,
                "measured_s": p.measured_s,
                "predicted_s": p.step_s,
                "error": p.error,
                "predicted_memory_bytes": p.memory_bytes,
                "measured_memory_gb": p.run.number("peak_memory_gb"),
                "memory_error": memory_error(p),
                "status": p.run.cells["status"],
                "fits": p.memory_bytes <= p.capacity_bytes,
                "recompute": p.recompute,
                "assumed": list(p.run.assumed),
                "kinds": p.kinds,
            }
            for p in predictions
        ],
        "refused": [{"id": run.id, "reason": reason} for run, reason in refused],
    }


def write_accuracy(swept: Swept, path: str | Path) -> None:
    """Writes the errors of the reliable runs by device and runtime, for plans to state."""
    groups: dict[tuple[str, str], list[float]] = {}
    for p in swept.predictions:
        if p.run.scored and p.error is not None:
            groups.setdefault((p.device, p.runtime), []).append(abs(p.error))
    found = [
        Checked(device=d, runtime=r, runs=len(e), mape=round(statistics.fmean(e), 4))
        for (d, r), e in sorted(groups.items())
    ]
    write_checked(found, path)
