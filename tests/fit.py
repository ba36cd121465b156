# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fit RUNS.csv`: fit what no table gives of `profiles/`, on published runs.

Every constant is physical, has bounds, and is shared by all sources that have its device or
runtime. Their effect on every row is taken to first order (a finite difference each), and the sum
of absolute relative errors is made least by coordinates. The same slopes give leave-one-source-out:
each source is predicted with constants that were fitted on all others. Not a test: pytest does not
collect it.

    python -m tests.fit runs.csv --rows 10            # what would move, and the errors left out
    python -m tests.fit runs.csv --rows 10 --write    # move it; again until nothing does
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np

from autoplan.check import case, machines, predict
from autoplan.check.rows import NotExpressedError, Run, read_runs
from autoplan.cluster_format import profiles_dir
from autoplan.runtime import _as_used, runtimes

STEP = 1.1  # of a finite difference, as a factor
LARGEST_MOVE = 0.35  # logarithm of the largest factor of one fit
PRIOR = 0.02  # weight of staying, in sources
SWEEPS = 40
MOST_ACTIONS = 40000  # of a replay: longer ones would take most of the time
# devices of one architecture and power class share what is fitted
FAMILIES = (
    ("a100-80g", "a100-40g", "a800-80g"),
    ("h100-80g", "h200-141g", "h800-80g", "gh200-96g"),
    ("h100-96g", "h100-94g"),
    ("b200-192g", "gb200-192g"),
    ("b300-288g", "gb300-288g"),
    ("v100-32g", "v100-16g"),
    ("rtx4090-24g", "rtx5090-32g", "l40s-48g", "rtxpro6000-96g", "rtx3090-24g", "a6000-48g"),
    ("mi300x-192g",),
)


@dataclass(frozen=True)
class Constant:
    """One number of one profile.

    Attributes:
        files: Below profiles/; all get the number.
        path: Keys in it.
        low, high: Its bounds.
        neutral: What it is believed to be where no run says anything of it.
    """

    files: tuple[str, ...]
    path: tuple[str | int, ...]
    low: float
    high: float
    neutral: float

    def __str__(self) -> str:
        return f"{self.files[0]} {'.'.join(map(str, self.path))}"

    def read(self) -> float:
        value = json.loads((profiles_dir() / self.files[0]).read_text())
        for key in self.path:
            value = value[key]
        return float(value)

    def write(self, number: float) -> None:
        """Puts the number into its file and forgets what was read from it."""
        for file in self.files:
            path = profiles_dir() / file
            document = json.loads(path.read_text())
            inner = document
            for key in self.path[:-1]:
                inner = inner[key]
            inner[self.path[-1]] = float(f"{number:.3g}")
            path.write_text(json.dumps(document, indent=2) + "\n")
        runtimes.cache_clear()
        _as_used.cache_clear()
        machines._cluster.cache_clear()


def constants() -> list[Constant]:
    """What is fitted."""
    found = []
    bounds = {
        "host_us": (2.0, 80.0, 8.0),
        "contention": (0.05, 0.4, 0.15),
        "products": (0.8, 1.0, 0.92),
        "float8_casts": (0.5, 5.0, 1.5),
        "hides_tp": (0.2, 0.95, 0.7),
        "norm_passes": (1.0, 6.0, 2.0),
        "send_us": (50.0, 3000.0, 500.0),
        "owner_us": (50.0, 5000.0, 100.0),
    }
    for path in sorted((profiles_dir() / "runtimes").glob("*.json")):
        if path.stem == "autoplan":
            continue
        document, files = json.loads(path.read_text()), (f"runtimes/{path.name}",)
        variants = enumerate(document.get("variants", ()))
        places = [((), document), *((("variants", i, "traits"), v["traits"]) for i, v in variants)]
        for where, traits in places:
            for key, (low, high, neutral) in bounds.items():
                if traits.get(key, 0.0) > (1.0 if key == "norm_passes" else 0.0):
                    found.append(Constant(files, (*where, key), low, high, neutral))
    for family in FAMILIES:
        files = tuple(f"devices/{device}.json" for device in family)
        found.append(Constant(files, ("kernel", "sustained"), 0.4, 1.0, 0.85))
        at = ("kernel", "efficiency", "memory", "share")
        found.append(Constant(files, at, 0.75, 0.92, 0.85))
    for link in ("ib-hdr", "ib-ndr", "eth-400g"):
        found.append(Constant((f"links/{link}.json",), ("efficiency",), 0.4, 0.95, 0.85))
    return found


class Fit:
    """Logarithms of predicted over measured for a sample of rows, and how the constants move them.

    Args:
        runs: The sample.
        fitted: The constants, as they are on disk.
    """

    def __init__(self, runs: list[Run], fitted: list[Constant]) -> None:
        self.runs: list[Run] = []
        off: list[float] = []
        touched: list[set[str]] = []
        for run in runs:
            error = _error(run)
            if error is not None:
                self.runs.append(run)
                off.append(math.log1p(error))
                touched.append(_files_of(run))
        self.off = np.array(off)
        self.fitted = [c for c in fitted if any(t.intersection(c.files) for t in touched)]
        self.slopes = np.zeros((len(self.runs), len(self.fitted)))
        for j, constant in enumerate(self.fitted):
            value = constant.read()
            other = value * STEP if value * STEP <= constant.high else value / STEP
            constant.write(other)
            for i, run in enumerate(self.runs):
                if touched[i].intersection(constant.files):
                    moved = math.log1p(_error(run) or 0.0) - self.off[i]
                    self.slopes[i, j] = moved / math.log(other / value)
            constant.write(value)

    def moves(self, without: str = "") -> dict[Constant, float]:
        """The logarithm of the factor of every constant that makes the rows' mean absolute error
        least, to first order and inside the bounds; a source weighs the same however many rows it
        has. Rows of the source `without` do not count; a constant of which no other row knows is
        its neutral one.
        """
        keep = np.array([run.prefix != without for run in self.runs])
        names = np.array([run.prefix for run in self.runs])
        weights = np.array([1.0 / (names[keep] == n).sum() if k else 0.0
                            for n, k in zip(names, keep)])  # fmt: skip
        low, high = self._bounds()
        moved = np.zeros(len(self.fitted))
        for _ in range(SWEEPS):
            for j in range(len(moved)):
                slope = self.slopes[:, j]
                rest = self.off + self.slopes @ moved - slope * moved[j]
                used = (np.abs(slope) > 1e-6) & keep
                if not used.any():
                    constant = self.fitted[j]
                    if without:
                        moved[j] = math.log(constant.neutral / constant.read())
                    continue
                # the weighted median of where each row's error would be 0, drawn to 0 a little
                at = np.append(-rest[used] / slope[used], 0.0)
                pull = np.append(weights[used] * np.abs(slope[used]), PRIOR)
                order = np.argsort(at)
                middle = np.searchsorted(np.cumsum(pull[order]), pull.sum() / 2.0)
                moved[j] = np.clip(at[order][middle], low[j], high[j])
        return dict(zip(self.fitted, moved))

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        values = [c.read() for c in self.fitted]
        low = [max(math.log(c.low / v), -LARGEST_MOVE) for c, v in zip(self.fitted, values)]
        high = [min(math.log(c.high / v), LARGEST_MOVE) for c, v in zip(self.fitted, values)]
        return np.minimum(low, 0.0), np.maximum(high, 0.0)

    def errors(self, moves: dict[Constant, float]) -> np.ndarray:
        """Predicted over measured, minus 1, after some moves, to first order."""
        return np.expm1(self.off + self.slopes @ np.array([moves[c] for c in self.fitted]))

    def score(self, errors: np.ndarray) -> float:
        """Mean over sources of the mean absolute error."""
        names = np.array([run.prefix for run in self.runs])
        return statistics.fmean(float(np.abs(errors[names == n]).mean()) for n in set(names))


def _error(run: Run) -> float | None:
    try:
        return predict.predict(run).error
    except NotExpressedError:
        return None


def _files_of(run: Run) -> set[str]:
    """The profiles that a run's prediction reads."""
    cluster = machines.cluster_of(run)
    links = (cluster.intra_host, cluster.inter_host)
    return {
        f"devices/{cluster.device.name}.json",
        f"runtimes/{case.runtime_for(run).name}.json",
        *(f"links/{link.name}.json" for link in links if link),
    }


def sample(runs: list[Run], rows: int) -> list[Run]:
    """At most `rows` of each source that stands by its numbers, evenly taken from those that can be
    priced.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.scored and _actions(run) <= MOST_ACTIONS and _is_expressed(run):
            groups.setdefault(run.prefix, []).append(run)
    return [run for group in groups.values() for run in group[:: max(1, -(-len(group) // rows))]]


def _is_expressed(run: Run) -> bool:
    try:
        case.case_of(run)
    except NotExpressedError:
        return False
    return True


def _actions(run: Run) -> float:
    """Computations of a pipeline's replay."""
    counts = [run.number(c) or 1.0 for c in ("pp", "vpp", "grad_accum")]
    return counts[0] * counts[1] * counts[2]


def leave_out(fit: Fit) -> None:
    """Prints, per source, its error under constants fitted on the others, and the median."""
    names = np.array([run.prefix for run in fit.runs])
    found = {}
    for source in sorted(set(names)):
        errors = fit.errors(fit.moves(without=source))
        found[source] = float(np.abs(errors[names == source]).mean())
        print(f"{source:12} {(names == source).sum():4d} rows  {found[source]:6.1%}")
    print(f"median over sources {statistics.median(found.values()):.1%}")


def main() -> None:
    """Fits, or leaves out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs")
    parser.add_argument("--rows", type=int, default=10, help="of each source")
    parser.add_argument("--write", action="store_true", help="move the profiles' constants")
    options = parser.parse_args()
    start = time.perf_counter()
    fit = Fit(sample(read_runs(options.runs), options.rows), constants())
    none = dict.fromkeys(fit.fitted, 0.0)
    moves = fit.moves()
    print(f"{len(fit.runs)} rows, {len(fit.fitted)} constants")
    print(f"error {fit.score(fit.errors(none)):.1%}, fitted {fit.score(fit.errors(moves)):.1%}")
    print("left out, to first order:")
    leave_out(fit)
    for constant, move in moves.items():
        value = constant.read()
        if abs(move) > 0.01:
            print(f"{constant}: {value:.4g} -> {value * math.exp(move):.4g}")
            if options.write:
                constant.write(value * math.exp(move))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
