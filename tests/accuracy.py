# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.accuracy`: predicted against measured step times on this machine.

Measures the machine (`autoplan profile --quick`), prices every plan of `accuracy_plans.py` with it,
runs each on four processes through `autoplan.parallelize` (forward, backward, AdamW), and prints
the errors, the rank correlation, and whether the plan that is really fastest for a model was among
the three predicted so. The plans are timed in rounds, each plan once a round, so that whatever else
the machine does falls on all of them; of a plan's rounds the least disturbed one stands, as in the
profile. `load` says what others computed meanwhile: above a tenth of the cores, wall times are
theirs too, and the column `work` (seconds computed by all ranks over the cores, which no step can
be faster than) is the better reference.

`--two-hosts`: two network namespaces of two processes each, 1 Gbit/s between them; needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, os.path.dirname(__file__))

from accuracy_plans import Case, build, cases, parse_pins

import autoplan

WORLD = 4


@dataclass(frozen=True)
class Outcome:
    """One plan: predicted seconds, wall seconds of the best round and of the median one, seconds
    computed by all ranks over the cores.
    """

    case: Case
    predicted_s: float
    wall_s: float
    median_s: float
    work_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.wall_s - 1.0

    @property
    def work_error(self) -> float:
        return self.predicted_s / self.work_s - 1.0


def plan_all(cluster: autoplan.Cluster, chosen: list[Case]) -> list[tuple[Case, autoplan.Plan]]:
    """The plan of every case, pinned completely: an estimate."""
    found = []
    for case in chosen:
        model, batch = build(case.model)
        found.append((case, autoplan.optimize(model, cluster, batch, pins=parse_pins(case.pins))))
    return found


def run_rank(folder: Path, rounds: int, steps: int) -> None:
    """One process: runs every plan of a folder, round by round; rank 0 writes what all took."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    jobs = json.loads((folder / "jobs.json").read_text())
    running = []
    for job in jobs:
        model, batch = build(job["model"])
        parallel = autoplan.parallelize(model, autoplan.Plan.from_json(job["plan"]))
        running.append((parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4), batch))

    def step(number: int) -> None:
        parallel, optimizer, batch = running[number]
        optimizer.zero_grad()
        parallel.forward_backward(**batch)
        optimizer.step()

    walls: list[list[float]] = [[] for _ in jobs]
    work: list[list[float]] = [[] for _ in jobs]
    for round_ in range(rounds + 1):
        for number in range(len(jobs)):
            times = []
            step(number)  # warms caches that the other plans have filled
            began = time.process_time()
            for _ in range(steps):
                dist.barrier()
                start = time.perf_counter()
                step(number)
                times.append(time.perf_counter() - start)
            mine = (times, (time.process_time() - began) / steps)
            every: list[tuple[list[float], float]] = [mine] * dist.get_world_size()
            dist.all_gather_object(every, mine)
            if round_:
                slowest = [max(rank[0][i] for rank in every) for i in range(steps)]
                walls[number].append(statistics.median(slowest))
                work[number].append(sum(rank[1] for rank in every))
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps({"walls": walls, "work": work}))
    dist.destroy_process_group()


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation of two lists without ties."""

    def ranks(values: list[float]) -> list[int]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [order.index(i) for i in range(len(values))]

    n = len(a)
    return 1.0 - 6.0 * sum((x - y) ** 2 for x, y in zip(ranks(a), ranks(b))) / (n * (n * n - 1))


def report(outcomes: list[Outcome], load: float, cores: int) -> dict[str, float]:
    """Prints the table; the figures."""
    print(
        f"{'plan':<62}{'predicted':>10}{'wall':>8}{'median':>8}{'work':>8}"
        f"{'error':>8}{'of work':>8}"
    )
    for o in outcomes:
        print(
            f"{o.case!s:<62}{o.predicted_s * 1e3:>10.1f}{o.wall_s * 1e3:>8.1f}"
            f"{o.median_s * 1e3:>8.1f}{o.work_s * 1e3:>8.1f}{o.error:>8.0%}{o.work_error:>8.0%}"
        )
    predicted = [o.predicted_s for o in outcomes]
    figures = {
        "plans": float(len(outcomes)),
        "load": load,
        "mape_wall": statistics.mean(abs(o.error) for o in outcomes),
        "bias_wall": statistics.mean(o.error for o in outcomes),
        "spearman_wall": spearman(predicted, [o.wall_s for o in outcomes]),
        "mape_work": statistics.mean(abs(o.work_error) for o in outcomes),
        "bias_work": statistics.mean(o.work_error for o in outcomes),
        "spearman_work": spearman(predicted, [o.work_s for o in outcomes]),
    }
    models = sorted({o.case.model for o in outcomes})
    hits = 0
    for model in models:
        mine = [o for o in outcomes if o.case.model == model]
        best = min(mine, key=lambda o: o.wall_s)
        hits += best in sorted(mine, key=lambda o: o.predicted_s)[:3]
    figures["best_in_top_3"] = hits / len(models)
    print(
        f"\n{len(outcomes)} plans; others computed {load:.1f} of {cores} cores meanwhile"
        f"{'' if load < 0.1 * cores else ': walls are theirs too, compare with work'}"
    )
    for name in ("wall", "work"):
        print(
            f"against {name}: mean |error| {figures[f'mape_{name}']:.1%}, "
            f"bias {figures[f'bias_{name}']:+.1%}, "
            f"rank correlation {figures[f'spearman_{name}']:.3f}"
        )
    print(f"the fastest plan of a model is among its predicted three: {hits} of {len(models)}")
    return figures


def busy_s() -> float:
    """Seconds that all cores of the machine have computed since it started."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a plan in a round")
    parser.add_argument("--two-hosts", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="only every so many-th plan")
    parser.add_argument("--output", help="write the figures here as JSON")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(Path(options.rank), options.rounds, options.steps)
        return
    from accuracy_hosts import Namespaces, launch

    with tempfile.TemporaryDirectory() as name, Namespaces(options.two_hosts) as hosts:
        folder = Path(name)
        launch(
            hosts, WORLD, ["-m", "autoplan", "profile", "--quick", "-o", str(folder / "it.json")]
        )
        cluster = autoplan.Cluster.load(folder / "it.json")
        chosen = cases(options.two_hosts)[:: options.every]
        plans = plan_all(cluster, chosen)
        jobs = [{"model": c.model, "plan": p.to_json()} for c, p in plans]
        (folder / "jobs.json").write_text(json.dumps(jobs))
        began, busy = time.perf_counter(), busy_s()
        arguments = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        ours = launch(hosts, WORLD, ["-m", "tests.accuracy", "--rank", str(folder), *arguments])
        load = (busy_s() - busy - ours) / (time.perf_counter() - began)
        result = json.loads((folder / "result.json").read_text())
    cores = len(os.sched_getaffinity(0))
    outcomes = [
        Outcome(
            case, plan.estimate.step_time_s, min(walls), statistics.median(walls), min(work) / cores
        )
        for (case, plan), walls, work in zip(plans, result["walls"], result["work"])
    ]
    figures = report(outcomes, max(load, 0.0), cores)
    if options.output:
        Path(options.output).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
