# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.zoo`: every architecture of the zoo, planned in forced and in free layouts, run
on gloo processes, and its loss and every gradient compared with one device.

    python -m tests.zoo --layouts tp2,pp2,dp2tp2,auto4 [--only causal:llama,vit] [--missing]

Every family and layout ends as one of
    equal      within 1e-9 in float64, or within 1e-4 where the model itself computes in float32
    refused    the planner or the capture says why not
    wrong      the numbers differ
    broken     anything else: a crash, a hang, a plan that does not run
and the table `tests/data/zoo_parity.csv` is rewritten (its rows of what was run). Exits 1 if
anything was wrong or broken. `--exact` keeps float64 where a model asks for float32, so that 1e-9
holds for all; its results are printed only.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, os.path.dirname(__file__))

import torch
from parity import gradient_errors, norm_of_gradients
from parity_table import LAYOUTS, slow_cluster
from pool import RemoteError, run_forked
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from zoo_models import FAMILIES_PER_PROCESS, SIZES, Entry, select

import autoplan
from autoplan.capture import Captured, capture
from autoplan.executor.module import ParallelModule
from autoplan.graph import Graph
from autoplan.plan import Plan

TABLE = Path(__file__).parent / "data" / "zoo_parity.csv"
DEFAULT_LAYOUTS = "tp2,pp2,dp2tp2,auto4"
OUTCOMES = ("equal", "refused", "wrong", "broken")
# largest relative error, and the share of all gradients' norm below which a gradient is noise
TOLERANCE = {"float64": (1e-9, 1e-6), "float32": (1e-4, 1e-3)}
NOISE = 0.1  # added to every weight: none is constant, no gate shut, attention is not uniform
FAMILY_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 240.0
PLAN_LIMIT_S = 180.0
ONE = "one"  # the layout that stands for one device


@dataclass(frozen=True)
class Row:
    """One family in one layout.

    Attributes:
        name: As "causal:llama".
        layout: A key of LAYOUTS, or "one": does it run on one device.
        outcome: One of OUTCOMES; "runs" or "fails" on one device.
        dtype: The coarsest that values with gradients are computed in.
        plan: Degrees, microbatches and schedule of what ran.
        loss, gradient: Largest relative errors, "" where nothing ran.
        reason: What refused, differed or broke; of what is equal, why its batch was not cut.
    """

    name: str
    layout: str
    outcome: str
    dtype: str = ""
    plan: str = ""
    loss: str = ""
    gradient: str = ""
    reason: str = ""


class KeepDouble(TorchFunctionMode):
    """A model's own casts to float32 give float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is Tensor.float:
            func = Tensor.double
        swap = {torch.float32: torch.float64, "torch.FloatTensor": "torch.DoubleTensor"}
        args = tuple(swap.get(a, a) if isinstance(a, torch.dtype | str) else a for a in args)
        kwargs = {
            k: swap.get(v, v) if isinstance(v, torch.dtype) else v
            for k, v in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def prepare(entry: Entry, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """The entry's model on the CPU in a dtype, all weights random, and its batch; it has run once.

    Raises:
        Exception: Whatever transformers raises, and ValueError if it gives no finite loss.
    """
    model, inputs = entry.build("cpu")
    model = model.to(dtype)
    for module in model.modules():
        if isinstance(getattr(module, "drop_prob", None), float):  # whole paths, by torch.rand
            module.drop_prob = 0.0
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.add_(noise, alpha=NOISE)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        loss = model(**inputs)["loss"]
    if loss is None or not bool(torch.isfinite(loss)):
        raise ValueError(f"the loss is {loss}")
    return model, inputs


def check_gradients(rank: int, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """One step on one device.

    Raises:
        ValueError: A gradient is not finite, or the loss is another one on every run.
    """
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses.append(model(**inputs)["loss"])
    if not torch.allclose(*losses, rtol=1e-6, atol=0.0):
        raise ValueError("the model draws random numbers: no two runs of it are equal")
    losses[0].backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            raise ValueError(f"the gradient of {name} is not finite")


def coarsest(graph: Graph) -> str:
    """float32 if a value that a gradient flows through is not in float64."""
    through = [v for v in graph.values.values() if v.requires_grad and v.meta.is_floating]
    return "float64" if all(v.meta.dtype == "float64" for v in through) else "float32"


def compare(
    rank: int,
    model: nn.Module,
    inputs: dict[str, Tensor],
    captured: Captured,
    plan: Plan,
    dtype: str,
    exact: bool,
) -> tuple[float, float, str]:
    """(loss error, largest gradient error, its parameter) of one step on this rank."""
    named = dict(model.named_parameters())
    parallel = ParallelModule(model, captured, plan, {})
    loss = parallel.forward_backward(**inputs)
    with KeepDouble() if exact else nullcontext():
        expected = model(**inputs)["loss"]
    expected.backward()
    errors = gradient_errors(parallel, named, TOLERANCE[dtype][1] * norm_of_gradients(named))
    worst = max(errors, key=lambda n: _or_infinite(errors[n]), default="")
    error = float((loss - expected.detach()).abs() / expected.detach().abs())
    return _or_infinite(error), _or_infinite(errors.get(worst, 0.0)), worst


def _or_infinite(error: float) -> float:
    return error if error == error else float("inf")


def rows_of(entry: Entry, layouts: tuple[str, ...], exact: bool = False) -> Iterator[Row]:
    """One device first, then every layout."""
    try:
        try:
            model, inputs = prepare(entry, torch.float64)
        except RuntimeError:  # a kernel without float64, as the grouped product
            model, inputs = prepare(entry, torch.float32)
        run_forked(1, check_gradients, model, inputs, timeout_s=RUN_TIMEOUT_S)
    except Exception as error:  # whatever an architecture raises is its own
        yield Row(entry.name, ONE, "fails", reason=_line(error))
        return
    yield Row(entry.name, ONE, "runs")
    try:
        with KeepDouble() if exact else nullcontext():
            captured = capture(model, inputs)
    except autoplan.AutoplanError as error:
        for layout in layouts:
            yield Row(entry.name, layout, "refused", reason=_line(error))
        return
    except Exception as error:  # everything else that capture raises is a defect
        for layout in layouts:
            yield Row(entry.name, layout, "broken", reason=f"capture: {_line(error)}")
        return
    for layout in layouts:
        yield _row(entry, layout, model, inputs, captured, exact)


def _row(
    entry: Entry,
    layout: str,
    model: nn.Module,
    inputs: dict[str, Tensor],
    captured: Captured,
    exact: bool,
) -> Row:
    dtype = coarsest(captured.graph)
    world, degrees = LAYOUTS[layout]
    try:
        plan, whole = _plan(model, inputs, captured, world, degrees)
    except autoplan.AutoplanError as error:
        return Row(entry.name, layout, "refused", dtype, reason=_line(error))
    except Exception as error:  # everything else that planning raises is a defect
        return Row(entry.name, layout, "broken", dtype, reason=f"planning: {_line(error)}")
    used = plan.layout.dp * plan.layout.tp * plan.layout.pp
    shape = (
        f"dp={plan.layout.dp} tp={plan.layout.tp} pp={plan.layout.pp} "
        f"m={plan.schedule.num_microbatches} {plan.schedule.name}"
    )
    job = (model, inputs, captured, plan, dtype, exact)
    try:
        found = run_forked(used, compare, *job, timeout_s=RUN_TIMEOUT_S)
    except (RemoteError, TimeoutError) as error:
        return Row(entry.name, layout, "broken", dtype, shape, reason=f"running: {_line(error)}")
    loss = max(f[0] for f in found)  # type: ignore[index]
    gradient, name = max((f[1], f[2]) for f in found)  # type: ignore[index]
    good = max(loss, gradient) <= TOLERANCE[dtype][0]
    return Row(
        entry.name, layout, "equal" if good else "wrong", dtype, shape,
        f"{loss:.0e}", f"{gradient:.0e}", whole if good else f"gradient of {name}",
    )  # fmt: skip


def _plan(
    model: nn.Module,
    inputs: dict[str, Tensor],
    captured: Captured,
    world: int,
    degrees: dict[str, int],
) -> tuple[Plan, str]:
    """The plan for a layout, from what is captured already; with one microbatch where the batch
    cannot be cut, and then why.
    """

    def planned(**pins: int) -> Plan:
        return autoplan.optimize(
            model,
            slow_cluster(world),
            inputs,
            pins=autoplan.Pins(**pins),  # type: ignore[arg-type]
            time_limit_s=PLAN_LIMIT_S,
        )

    with patch("autoplan.capture.capture", lambda *_, **__: captured):
        try:
            return planned(**degrees), ""
        except autoplan.InfeasibleError as error:
            if "num_microbatches" not in degrees:
                raise
            plan = planned(**{**degrees, "num_microbatches": 1})
            return plan, _line(error)


def _line(error: BaseException) -> str:
    """An exception in one line: of a rank's traceback the end."""
    text = str(error).strip()
    if isinstance(error, RemoteError):
        own = [x for x in text.splitlines() if "/executor/" in x]
        where = own[-1].rsplit("/", 1)[-1].replace('"', "") if own else ""
        raised = re.findall(r"^\w[\w.]*(?:Error|Exception)\b.*$", text, re.M)  # the cause is first
        return f"{raised[0][:300] if raised else text.splitlines()[-1][:300]} ({where})"
    text = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {text[:400]}"


# -- the sweep


def _serve(pipe: Connection, layouts: tuple[str, ...], exact: bool) -> None:
    """A worker: families come, rows go; None after the last row of each."""
    os.setsid()  # its forks end with it
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (entry := pipe.recv()) is not None:
        for row in rows_of(entry, layouts, exact):
            pipe.send(row)
        pipe.send(None)


class Worker:
    """A process that works through families, replaced when one takes too long or ends it."""

    def __init__(self, layouts: tuple[str, ...], exact: bool) -> None:
        self._settings = (layouts, exact)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._settings))
        self._process.start()
        theirs.close()
        self.entry: Entry | None = None
        self._rows: list[Row] = []
        self._done = 0

    def give(self, entry: Entry) -> None:
        """Starts a family."""
        if self._done == FAMILIES_PER_PROCESS:
            self.close()
            self._start()
        self._done += 1
        self.entry, self._rows, self._since = entry, [], time.monotonic()
        self.pipe.send(entry)

    def take(self) -> list[Row] | None:
        """The family's rows once it is done, timed out or has ended the process."""
        try:
            while self.pipe.poll():
                row = self.pipe.recv()
                if row is None:
                    self.entry = None
                    return self._rows
                self._rows.append(row)
        except (EOFError, ConnectionResetError):
            return self._give_up("ended the process")
        if time.monotonic() - self._since > FAMILY_TIMEOUT_S:
            return self._give_up(f"not done in {FAMILY_TIMEOUT_S:.0f} s")
        return None

    def _give_up(self, reason: str) -> list[Row]:
        assert self.entry is not None
        rows, name, done = self._rows, self.entry.name, {r.layout for r in self._rows}
        missing = [x for x in self._settings[0] if x not in done] if done else [ONE]
        self.close()
        self._start()
        return [
            *rows,
            *(Row(name, x, "fails" if x == ONE else "broken", reason=reason) for x in missing),
        ]

    def close(self) -> None:
        """Ends the process and its forks."""
        with _gone_is_fine():
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.kill()
        self._process.join()


@contextmanager
def _gone_is_fine() -> Iterator[None]:
    try:
        yield
    except ProcessLookupError:
        pass


def sweep(
    entries: list[Entry], layouts: tuple[str, ...], jobs: int, exact: bool
) -> Iterator[list[Row]]:
    """The rows of each family as it is done."""
    workers = [Worker(layouts, exact) for _ in range(min(jobs, len(entries)))]
    todo = list(reversed(entries))
    try:
        for worker in workers:
            worker.give(todo.pop())
        while any(w.entry is not None for w in workers):
            wait([w.pipe for w in workers if w.entry is not None], 1.0)
            for worker in workers:
                rows = worker.take() if worker.entry is not None else None
                if rows is not None:
                    yield rows
                    if todo:
                        worker.give(todo.pop())
    finally:
        for worker in workers:
            worker.close()


def read_table(path: Path = TABLE) -> dict[tuple[str, str], Row]:
    """The committed rows by family and layout."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(r["name"], r["layout"]): Row(**r) for r in csv.DictReader(file)}


def write_table(rows: dict[tuple[str, str], Row], path: Path = TABLE) -> None:
    """All rows, sorted."""
    names = [f.name for f in fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, n) for n in names] for _, row in sorted(rows.items()))


def totals(rows: list[Row]) -> str:
    """Per layout the count of each outcome and the largest errors by dtype."""
    lines = []
    for layout in dict.fromkeys(r.layout for r in rows):
        of = [r for r in rows if r.layout == layout]
        counts = Counter(r.outcome for r in of)
        if layout == ONE:
            lines.append(f"{layout:8} runs {counts['runs']}, fails {counts['fails']}")
            continue
        worst = []
        for dtype in TOLERANCE:
            errors = [float(e) for r in of if r.dtype == dtype for e in (r.loss, r.gradient) if e]
            if errors:
                worst.append(f"{dtype} {max(errors):.0e}")
        told = ", ".join(f"{o} {counts[o]}" for o in OUTCOMES)
        lines.append(f"{layout:8} {told}; largest error {', '.join(worst) or '-'}")
    return "\n".join(lines)


def main() -> int:
    """Runs the sweep; 0 when everything is equal or refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--layouts", default=DEFAULT_LAYOUTS)
    parser.add_argument("--only", default="", help="names or families, with commas")
    parser.add_argument("--missing", action="store_true", help="only what the table lacks")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    layouts = tuple(options.layouts.split(","))
    table = read_table()
    done_before = {name for name, _ in table} if options.missing else set()
    entries = select(options.size, options.only, done_before)
    entries = entries[: options.limit]
    if not entries:
        parser.error(f"--only {options.only} names nothing of the zoo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # workers end with this process
    start, ran = time.perf_counter(), []
    for done, rows in enumerate(sweep(entries, layouts, options.jobs, options.exact), 1):
        ran += rows
        for row in rows:
            if row.outcome == "fails":  # what it once did in a layout says nothing any more
                table = {key: old for key, old in table.items() if key[0] != row.name}
            table[row.name, row.layout] = row
            errors = f"{row.dtype} loss {row.loss} gradients {row.gradient}" if row.loss else ""
            print(
                f"{row.name:36} {row.layout:7} {row.outcome:8} {row.plan} {errors} {row.reason}",
                flush=True,
            )
        print(f"-- {done}/{len(entries)}, {time.perf_counter() - start:.0f} s", flush=True)
        if not options.exact and options.size == "tiny":
            write_table(table)
    print(totals(ran))
    print(f"{len(entries)} families, {time.perf_counter() - start:.0f} s")
    return 1 if any(r.outcome in ("wrong", "broken") for r in ran) else 0


if __name__ == "__main__":
    sys.exit(main())
