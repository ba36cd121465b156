# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fit RUNS.csv`: fit what no table gives of `profiles/`, on published runs.

Coordinate descent on the mean over sources of the mean absolute relative error (of one row at most
LARGEST). Each constant is physical, has bounds, and is shared by every source that has its device
or runtime. With --leave-out each source is predicted with constants that were fitted on all others;
the profiles are put back afterwards. Not a test: pytest does not collect it.

    python -m tests.fit runs.csv --rows 12 --rounds 3
    python -m tests.fit runs.csv --leave-out --rows 8 --rounds 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from autoplan.check import case, machines, predict
from autoplan.check.rows import NotExpressedError, Run, read_runs
from autoplan.cluster_format import profiles_dir
from autoplan.runtime import runtimes

LARGEST = 0.5
MOST_ACTIONS = 3000  # of a replay: longer ones would take most of the time
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
    """

    files: tuple[str, ...]
    path: tuple[str, ...]
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.files[0]} {'.'.join(self.path)}"

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
        machines._cluster.cache_clear()


def constants() -> list[Constant]:
    """What is fitted."""
    found = []
    for path in sorted((profiles_dir() / "runtimes").glob("*.json")):
        if path.stem == "autoplan":
            continue
        document, file = json.loads(path.read_text()), f"runtimes/{path.name}"
        if document.get("host_us"):
            found.append(Constant((file,), ("host_us",), 2.0, 80.0))
        if document.get("contention"):
            found.append(Constant((file,), ("contention",), 0.05, 0.4))
        if document.get("products"):
            found.append(Constant((file,), ("products",), 0.8, 1.0))
        if document.get("float8_casts"):
            found.append(Constant((file,), ("float8_casts",), 0.5, 5.0))
        if document.get("hides_tp"):
            found.append(Constant((file,), ("hides_tp",), 0.2, 0.95))
        if document.get("norm_passes", 1.0) > 1.0:
            found.append(Constant((file,), ("norm_passes",), 1.0, 6.0))
    for family in FAMILIES:
        files = tuple(f"devices/{device}.json" for device in family)
        found.append(Constant(files, ("kernel", "sustained"), 0.4, 1.0))
        at = ("kernel", "efficiency", "memory", "share")
        found.append(Constant(files, at, 0.75, 0.92))
    for link in ("ib-hdr", "ib-ndr", "eth-400g"):
        found.append(Constant((f"links/{link}.json",), ("efficiency",), 0.4, 1.0))
    return found


class Fit:
    """Errors of a sample of rows under the profiles as they are on disk.

    Args:
        runs: The sample.
    """

    def __init__(self, runs: list[Run]) -> None:
        self.errors: dict[str, float] = {}
        self.touches: dict[str, set[str]] = {}
        self.runs = []
        for run in runs:
            try:
                error = predict.predict(run).error
            except NotExpressedError:
                continue
            if error is not None:
                self.runs.append(run)
                self.errors[run.id] = error
                cluster = machines.cluster_of(run)
                links = (cluster.intra_host, cluster.inter_host)
                self.touches[run.id] = {
                    f"devices/{cluster.device.name}.json",
                    f"runtimes/{case.runtime_for(run).name}.json",
                    *(f"links/{link.name}.json" for link in links if link),
                }

    def score(self, errors: dict[str, float]) -> float:
        """Mean over sources of the mean error."""
        groups: dict[str, list[float]] = {}
        for run in self.runs:
            groups.setdefault(run.prefix, []).append(min(abs(errors[run.id]), LARGEST))
        return statistics.fmean(map(statistics.fmean, groups.values())) if groups else 0.0

    def again(self, files: tuple[str, ...]) -> dict[str, float]:
        """Errors after a change of some files."""
        errors = dict(self.errors)
        for run in self.runs:
            if self.touches[run.id].intersection(files):
                errors[run.id] = predict.predict(run).error or 0.0
        return errors

    def run(self, rounds: int, report: Callable[[str], None]) -> None:
        """Improves every constant in turn, by ever smaller steps; leaves the best on disk."""
        best = self.score(self.errors)
        steps = [0.25 / 2**i for i in range(rounds)]
        for step in steps:
            for constant in constants():
                if not any(t.intersection(constant.files) for t in self.touches.values()):
                    continue
                start = value = constant.read()
                for sign in (1.0, -1.0):
                    moved = False
                    while True:
                        trial = min(max(value * (1.0 + step) ** sign, constant.low), constant.high)
                        if trial == value:
                            break
                        constant.write(trial)
                        errors = self.again(constant.files)
                        score = self.score(errors)
                        if score > best - 1e-5:
                            constant.write(value)
                            break
                        best, value, self.errors, moved = score, trial, errors, True
                    if moved:
                        break
                if value != start:
                    report(f"{best:.4f}  {constant}: {start:.4g} -> {value:.4g}")


def sample(runs: list[Run], rows: int) -> list[Run]:
    """At most `rows` of each source that stands by its numbers, evenly taken."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.scored and _actions(run) <= MOST_ACTIONS:
            groups.setdefault(run.prefix, []).append(run)
    return [run for group in groups.values() for run in group[:: max(1, -(-len(group) // rows))]]


def _actions(run: Run) -> float:
    """Computations of a pipeline's replay."""
    counts = [run.number(c) or 1.0 for c in ("pp", "vpp", "grad_accum")]
    return counts[0] * counts[1] * counts[2]


def leave_out(runs: list[Run], rows: int, rounds: int) -> None:
    """Prints, per source, its error under constants fitted on the others, and the median."""
    files = [p for p in profiles_dir().rglob("*.json") if p.parent.name != "clusters"]
    before = {p: p.read_bytes() for p in files}
    found = {}
    try:
        for source in sorted({run.prefix for run in runs if run.scored}):
            Fit(sample([r for r in runs if r.prefix != source], rows)).run(rounds, lambda _: None)
            mine = Fit([r for r in runs if r.prefix == source and r.scored])
            if mine.runs:
                found[source] = statistics.fmean(abs(e) for e in mine.errors.values())
                print(f"{source:12} {len(mine.runs):4d} rows  {found[source]:6.1%}", flush=True)
            for path, data in before.items():
                path.write_bytes(data)
            runtimes.cache_clear()
            machines._cluster.cache_clear()
        print(f"median over sources {statistics.median(found.values()):.1%}")
    finally:
        for path, data in before.items():
            path.write_bytes(data)


def main() -> None:
    """Fits, or leaves out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs")
    parser.add_argument("--rows", type=int, default=12, help="of each source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--leave-out", action="store_true")
    options = parser.parse_args()
    runs = read_runs(options.runs)
    start = time.perf_counter()
    if options.leave_out:
        leave_out(runs, options.rows, options.rounds)
    else:
        fit = Fit(sample(runs, options.rows))
        print(f"{fit.score(fit.errors):.4f} with {len(fit.runs)} rows")
        fit.run(options.rounds, lambda line: print(line, flush=True))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
