# SPDX-License-Identifier: Apache-2.0
"""Commands that make plans: plan, size.

The user's FUNCTION is imported and called, the planner is called with what the options say. What
the user's code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autoplan.cli.group import cli, common, emit
from autoplan.errors import AutoplanError, CaptureError, InfeasibleError

if TYPE_CHECKING:
    from autoplan.cluster import Cluster
    from autoplan.plan import Plan


def _degree(*names: str, text: str) -> Callable[..., Any]:
    return click.option(*names, type=click.IntRange(min=1), help=text)


def _parse_counts(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """Text such as 3,4 as (3, 4)."""
    if value is None:
        return None
    try:
        counts = tuple(int(part) for part in value.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{value!r} is not a list of layer counts; write it as 3,4.")
    return counts


def _parse_placements(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    """Pairs NAME=SPEC; a spec that does not parse is refused here, before any model is built."""
    from autoplan.placements import parse_spec

    placements = {}
    for value in values:
        name, equals, spec = value.rpartition("=")
        if not (name and equals and spec):
            raise click.BadParameter(f"{value!r} is not NAME=SPEC; write lm_head.weight=RS(0).")
        try:
            parse_spec(spec)
        except ValueError as error:
            raise click.BadParameter(f"{name}: {error}.") from error
        placements[name] = spec
    return placements


def _planning(command: Callable[..., Any]) -> Callable[..., Any]:
    """What commands that plan share: the model, the pins, the wishes."""
    options = (
        click.argument("function", metavar="FILE.py:FUNCTION"),
        _degree("--tp", "-tp", "--tensor-parallel-size", "tp", text="Pin tensor parallelism."),
        _degree("--pp", "-pp", "--pipeline-parallel-size", "pp", text="Pin the stages."),
        _degree("--dp", "-dp", "--data-parallel-size", "dp", text="Pin data parallelism."),
        click.option("--zero", type=click.IntRange(0, 3), help="Pin the ZeRO level."),
        _degree("--num-microbatches", text="Pin the number of microbatches."),
        click.option("--schedule", type=click.Choice(["gpipe", "1f1b"]), help="Pin the schedule."),
        click.option("--recompute/--no-recompute", default=None, help="Pin recomputation."),
        click.option("--stage-layers", callback=_parse_counts, help="Pin layers a stage, as 3,4."),
        click.option(
            "--placement",
            "placements",
            multiple=True,
            callback=_parse_placements,
            metavar="NAME=SPEC",
            help="Pin a parameter's sharding spec; NAME may hold *. Repeatable.",
        ),
        click.option(
            "--optimizer", type=click.Choice(["adamw", "sgd", "sgd-momentum"]), default="adamw"
        ),
        click.option(
            "--precision", type=click.Choice(["bf16-mixed"]), help="Default: the model's own."
        ),
        click.option(
            "--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True
        ),
        click.option(
            "--memory-reserve",
            type=click.FloatRange(0.0, 1.0, max_open=True),
            default=0.08,
            show_default=True,
            help="Fraction of every device that no plan may use.",
        ),
        click.option(
            "--time-limit",
            "time_limit_s",
            type=click.FloatRange(min=0.0),
            default=60.0,
            show_default=True,
            help="Seconds for the search on each cluster.",
        ),
        click.option(
            "--top",
            type=click.IntRange(min=0),
            default=3,
            show_default=True,
            help="Alternatives to keep.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@click.option(
    "--cluster",
    "clusters",
    multiple=True,
    required=True,
    help="KIND-HxD such as dgx-h100-2x8, or a JSON file. Repeatable: the plans are compared.",
)
@_planning
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Save the plan here; of several, each under its cluster's name too.",
)
@common
def plan(
    clusters: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Plan the model that FUNCTION returns, as (model, inputs) or (model, inputs, loss_fn).

    The inputs are one global batch: a keyword dict or a positional tuple.
    """
    from autoplan.cluster import Cluster

    loaded = [Cluster.load(name) for name in clusters]  # first: a wrong name costs nothing then
    found: dict[str, Plan] = {}
    refused: dict[str, InfeasibleError] = {}
    with _results_only():
        for name, (_, result) in zip(clusters, _optimize(loaded, quiet, options)):
            if isinstance(result, InfeasibleError):
                refused[name] = result
                continue
            found[name] = result
            if output is not None:
                path = output if len(clusters) == 1 else _beside(output, name)
                result.save(path)
                if not quiet:
                    click.echo(f"wrote {path}", err=True)
    if not found:
        raise next(iter(refused.values()))
    if len(clusters) == 1:
        (chosen,) = found.values()
        click.echo(chosen.to_json() if as_json else chosen.summary(), nl=False)
    else:
        _emit_comparison(found, refused, as_json)


@contextlib.contextmanager
def _results_only() -> Iterator[None]:
    """What the user's code and native libraries print meanwhile goes to stderr: it is no result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _beside(output: Path, cluster: str) -> Path:
    """plan.json for cluster dgx-h100-2x8 as plan.dgx-h100-2x8.json."""
    return output.with_name(f"{output.stem}.{Path(cluster).stem}{output.suffix}")


def _emit_comparison(
    found: dict[str, Plan], refused: dict[str, InfeasibleError], as_json: bool
) -> None:
    from autoplan.render.compare import compare_data, compare_text

    reasons = {name: str(error) for name, error in refused.items()}
    if as_json:
        emit({**compare_data(found), "refused": reasons})
        return
    page = compare_text(found) if len(found) > 1 else next(iter(found.values())).summary()
    click.echo(page, nl=False)
    for name, reason in reasons.items():
        click.echo(f"\n{name} does not fit: {reason}")


@cli.command()
@_planning
@click.option("--device", help="Device of the cluster, such as h100-80g.")
@click.option("--kind", help="Kind of cluster, such as dgx-h100; default: one with that device.")
@click.option(
    "--max-devices", type=click.IntRange(min=1), default=512, show_default=True, help="Try no more."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Save the plan for the smallest size here.",
)
@common
def size(
    device: str | None,
    kind: str | None,
    max_devices: int,
    output: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Find the fewest devices on which the model of FUNCTION fits, and what more of them bring."""
    from autoplan.render.sizes import sizes_data, sizes_text
    from autoplan.sizing import Ladder, kind_with

    if (device is None) == (kind is None):
        raise click.UsageError("name the devices by one of --device and --kind")
    ladder = Ladder(kind or kind_with(str(device)), max_devices)
    with _results_only():
        for cluster, result in _optimize(ladder.clusters(), quiet, options):
            ladder.note(cluster, result)
            if not quiet:
                fits = "fits" if not isinstance(result, InfeasibleError) else "does not fit"
                click.echo(f"{cluster.num_devices} devices: {fits}", err=True)
    rows = ladder.curve
    smallest = ladder.smallest
    if smallest is None or smallest.plan is None:
        raise InfeasibleError(
            f"nothing up to {max_devices} devices of {ladder.kind} is enough: {rows[-1].reason}"
        )
    if output is not None:
        smallest.plan.save(output)
    if as_json:
        emit({"kind": ladder.kind, **sizes_data(rows)})
    else:
        click.echo(sizes_text(rows), nl=False)


def _optimize(
    clusters: Iterable[Cluster], quiet: bool, options: dict[str, Any]
) -> Iterator[tuple[Cluster, Plan | InfeasibleError]]:
    """Calls the planner for each cluster in turn."""
    from autoplan.api import optimize_each
    from autoplan.api_pins import Pins

    model, inputs, loss_fn = _build(options.pop("function"))
    names = ("tp", "pp", "dp", "zero", "num_microbatches", "schedule", "recompute", "stage_layers")
    pins = Pins(**{name: options.pop(name) for name in names}, placements=options.pop("placements"))
    with progress(quiet) as report:
        yield from optimize_each(
            model, clusters, inputs, loss_fn=loss_fn, pins=pins, progress=report, **options
        )


def _build(function: str) -> tuple[Any, Any, Any]:
    """Model, inputs and loss function (or None) that the user's FUNCTION returns.

    Raises:
        CaptureError: There is no such file or function, it fails, or returns something else.
    """
    file, _, name = function.rpartition(":")
    expected = "expected FILE.py:FUNCTION"
    if not file or not name:
        raise CaptureError(f"{function!r} names no function, {expected}. Write model.py:build.")
    path = Path(file)
    if not path.is_file():
        raise CaptureError(f"there is no file {file}, {expected}. Check the path.")
    try:
        builder = getattr(_import_file(path), name, None)
        if not callable(builder):
            raise CaptureError(f"{file} has no function {name!r}, {expected}. Check the name.")
        result = builder()
    except AutoplanError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if Path(f.filename) == path.resolve()]
        where = f"{file}:{own[-1].lineno}" if own else function
        raise CaptureError(
            f"{function} raised {type(error).__name__} at {where}: {error}. Run it by itself to "
            "see the whole traceback."
        ) from error
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise CaptureError(
            f"{function} returned {type(result).__name__}, expected (model, inputs) or (model, "
            "inputs, loss_fn). Return one of those."
        )
    return result[0], result[1], result[2] if len(result) == 3 else None


def _import_file(path: Path) -> Any:
    """The user's file as a module; its folder is importable from, as for `python FILE.py`."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise CaptureError(
            f"{path} is not a Python file, expected FILE.py. Rename it to end in .py."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, float], None] | None]:
    """A bar on stderr where that is a terminal; else None, and the planner reports nothing."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)
