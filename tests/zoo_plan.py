# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.zoo_plan`: every architecture of the zoo, full size, planned for eight devices.

    python -m tests.zoo_plan [--only causal:llama,image] [--missing] [--limit 10] [--jobs 2]

Every family ends as one of
    planned    a plan; its ops without a rule, and the share of forward FLOPs in ops that have one
    refused    autoplan says why not
    fails      transformers cannot build it, or the model itself raises on its batch
    broken     anything else: a crash, or not done in time
and its row of the table `tests/data/zoo_plan.csv` is rewritten. Exits 1 if anything was broken.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, os.path.dirname(__file__))

import torch
from torch import Tensor, nn
from zoo_models import FAMILIES_PER_PROCESS, Entry, loss_of_logits, select

import autoplan
from autoplan.capture import capture
from autoplan.solver.space import Space

TABLE = Path(__file__).parent / "data" / "zoo_plan.csv"
CLUSTER = "dgx-h100-1x8"
OUTCOMES = ("planned", "refused", "fails", "broken")
TIMEOUT_S = 300  # of the processor, as all seconds of the table: others may use the machine


@dataclass(frozen=True)
class Row:
    """One family.

    Attributes:
        name: As "causal:llama".
        outcome: One of OUTCOMES.
        layout: Degrees and microbatches of the plan.
        ops: Ops of the graph.
        unruled: Targets without a rule, with how many ops each.
        ruled: Share of forward FLOPs in ops with a rule, in percent.
        uncut: Why the batch cannot be cut into microbatches, if it cannot.
        capture_s, plan_s: Processor seconds, of the capture and of the rest.
        reason: What refused, failed or broke.
    """

    name: str
    outcome: str
    layout: str = ""
    ops: str = ""
    unruled: str = ""
    ruled: str = ""
    uncut: str = ""
    capture_s: str = ""
    plan_s: str = ""
    reason: str = ""


class Overtime(BaseException):
    """A family took too long; no `except Exception` may take this for a refusal."""


def _alarm(*_: object) -> None:
    raise Overtime


def row_of(entry: Entry) -> Row:
    """What becomes of one family."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S)
    try:
        return _row_of(entry)
    except Overtime:
        return Row(entry.name, "broken", reason=f"not done in {TIMEOUT_S} s")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _row_of(entry: Entry) -> Row:
    try:
        model, inputs = entry.build("meta")
    except Exception as error:  # whatever an architecture raises is its own
        return Row(entry.name, "fails", reason=f"build: {_line(error)}")
    start = time.process_time()
    try:
        try:
            captured = capture(model, inputs)
        except autoplan.CaptureError as error:
            if "gives no loss" not in str(error):
                raise
            captured = capture(model, inputs, loss_fn=loss_of_logits)
        middle = time.process_time()
        with patch("autoplan.capture.capture", lambda *_, **__: captured):
            plan = autoplan.optimize(model, autoplan.Cluster.load(CLUSTER), inputs)
    except autoplan.AutoplanError as error:
        own = _own_failure(model, inputs)
        if own:
            return Row(entry.name, "fails", reason=own)
        return Row(entry.name, "refused", reason=_line(error))
    except Exception as error:  # everything else that planning raises is a defect
        return Row(entry.name, "broken", reason=_line(error))
    end = time.process_time()
    space = Space.of(captured.graph)
    target = {op.name: op.target for op in captured.graph.ops}
    unruled = Counter(target[name] for name in plan.unruled_ops)
    layout = plan.layout
    return Row(
        entry.name,
        "planned",
        f"pp{layout.pp} dp{layout.dp} tp{layout.tp} m{plan.schedule.num_microbatches}",
        str(len(captured.graph.ops)),
        " ".join(f"{t}:{n}" for t, n in sorted(unruled.items())),
        f"{100 * space.ruled_share:.2f}",
        next(iter(space.batch.hindrances.values()), ""),
        f"{middle - start:.1f}",
        f"{end - middle:.1f}",
    )


def _own_failure(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """What the model raises by itself on meta; "" if nothing, or only that meta has no values."""
    try:
        model(**inputs)
    except Exception as error:  # whatever an architecture raises is its own
        text = _line(error)
        return "" if "meta" in text.lower() else f"the model itself: {text}"
    return ""


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:400] if text else ''}"


def _serve(pipe: Connection, entries: list[Entry]) -> None:
    for entry in entries:
        pipe.send(row_of(entry))
    pipe.close()


def sweep(entries: list[Entry], jobs: int) -> Iterator[Row]:
    """Every family's row as it is done. A process does a few families; what it leaves undone when
    it ends goes on in another one.
    """
    context = multiprocessing.get_context("spawn")
    size = min(FAMILIES_PER_PROCESS, -(-len(entries) // jobs))
    todo = [entries[i : i + size] for i in range(0, len(entries), size)][::-1]
    running: dict[Connection, list[Entry]] = {}
    while todo or running:
        while todo and len(running) < jobs:
            ours, theirs = context.Pipe(duplex=False)
            context.Process(target=_serve, args=(theirs, todo[-1]), daemon=True).start()
            theirs.close()
            running[ours] = list(todo.pop())
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection), "only pipes are waited for"
            left = running[pipe]
            try:
                row = pipe.recv()
            except EOFError:
                del running[pipe]
                if left:
                    yield Row(left.pop(0).name, "broken", reason="the process ended")
                if left:
                    todo.append(left)
                continue
            left.pop(0)
            yield row


def read_table(path: Path = TABLE) -> dict[str, Row]:
    """The committed rows by family."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {r["name"]: Row(**r) for r in csv.DictReader(file)}


def write_table(rows: dict[str, Row], path: Path = TABLE) -> None:
    """All rows, sorted."""
    names = [f.name for f in fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, n) for n in names] for _, row in sorted(rows.items()))


def totals(rows: list[Row]) -> str:
    """Counts, what has no rule, and the times."""
    counts = Counter(r.outcome for r in rows)
    planned = [r for r in rows if r.outcome == "planned"]
    below = sorted((float(r.ruled), r.name) for r in planned if float(r.ruled) < 99.9)
    unruled = Counter(t.partition(":")[0] for r in planned for t in r.unruled.split())
    lines = [
        ", ".join(f"{o} {counts[o]}" for o in OUTCOMES),
        f"below 99.9% of forward FLOPs in ops with a rule: {below or 'none'}",
        f"targets without a rule, by families: {dict(unruled) or 'none'}",
        f"batch cannot be cut: {sum(bool(r.uncut) for r in planned)}",
    ]
    if planned:
        seconds = sorted(float(r.capture_s) + float(r.plan_s) for r in planned)
        lines.append(
            f"processor seconds: median {seconds[len(seconds) // 2]:.1f}, most {seconds[-1]:.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Runs the sweep; 0 when every family is planned, refused or fails by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, families or tasks, with commas")
    parser.add_argument("--missing", action="store_true", help="only what the table lacks")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", type=Path, default=TABLE, help="where the rows are written")
    options = parser.parse_args()
    table = read_table(options.table)
    entries = select("full", options.only, table if options.missing else ())
    entries = entries[: options.limit]
    if not entries:
        parser.error(f"--only {options.only} names nothing of the zoo")
    start, ran = time.perf_counter(), []
    for row in sweep(entries, options.jobs):
        ran.append(row)
        table[row.name] = row
        write_table(table, options.table)
        seconds = f"{row.capture_s}+{row.plan_s} s" if row.capture_s else ""
        told = " ".join((row.layout, row.unruled, row.uncut, seconds, row.reason))
        print(f"{len(ran)}/{len(entries)} {row.name:36} {row.outcome:8} {told}", flush=True)
    print(totals(ran))
    print(f"{len(entries)} families, {time.perf_counter() - start:.0f} s")
    return 1 if any(r.outcome == "broken" for r in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
