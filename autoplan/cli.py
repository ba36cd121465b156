# SPDX-License-Identifier: Apache-2.0
"""The command line: autoplan plan | show | explain | validate | demo.

Arguments in, one call of a room's door, a page or (--json) one JSON document on stdout; logs,
progress and errors on stderr. Exit codes: 0, 2 bad input, 3 infeasible, 1 internal, 130
interrupted. Rooms are imported by the command that needs them, so `show`, `explain` and `validate`
never load torch. Not here: any decision.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from autoplan.errors import (
    AutoplanError,
    CaptureError,
    ClusterError,
    InfeasibleError,
    PlanError,
    ProfileError,
)

if TYPE_CHECKING:
    from autoplan.plan import Plan

BAD_INPUT, INFEASIBLE, INTERNAL, INTERRUPTED = 2, 3, 1, 130
LEVELS = ("debug", "info", "warning", "error")


class _Commands(click.Group):
    """The group, with autoplan's exit codes and one-line errors in place of click's."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> NoReturn:
        arguments = list(sys.argv[1:] if args is None else args)
        kwargs["standalone_mode"] = False
        try:
            code = super().main(arguments, *rest, **kwargs)
        except Exception as error:
            code = _report(error, as_json="--json" in arguments)
        sys.exit(code if isinstance(code, int) else 0)


def _report(error: Exception, *, as_json: bool) -> int:
    """Says what went wrong, one line on stderr and with --json a document too; the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of stdout left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return BAD_INPUT
    message, code = str(error), INTERNAL
    if isinstance(error, click.Abort):  # what click makes of Ctrl-C
        message, code = "interrupted", INTERRUPTED
    elif isinstance(error, click.ClickException):
        message, code = error.format_message(), BAD_INPUT
    elif isinstance(error, InfeasibleError):
        code = INFEASIBLE
    elif isinstance(error, (PlanError, ClusterError, ProfileError, CaptureError)):
        code = BAD_INPUT
    else:
        traceback.print_exception(error, file=sys.stderr)
        message = f"{type(error).__name__}: {error}"
    line = " ".join(message.split())
    click.echo(f"error: {line}", err=True)
    if as_json:
        document: dict[str, object] = {"error": line}
        if isinstance(error, InfeasibleError):
            tried = error.candidates or (("every layout", line),)
            document["candidates"] = [{"layout": a, "reason": b} for a, b in tried]
        _emit(document)
    return code


def _emit(document: object) -> None:
    """Writes one JSON document to stdout."""
    click.echo(json.dumps(document, indent=1, sort_keys=True))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0, 2 bad input, 3 nothing feasible, 1 internal error, 130 interrupted.",
)
def cli() -> None:
    """Plans how a PyTorch model runs on many devices."""


class _LogToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)  # the stderr of now, not of the first call


def _set_level(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Sends autoplan's own log to stderr at the level asked for."""
    logger, handler = logging.getLogger("autoplan"), _LogToStderr()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(value.upper())
    return value


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of every command."""
    options = (
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="One JSON document on stdout, nothing else.",
        ),
        click.option("--quiet", "-q", is_flag=True, help="No progress, no notices."),
        click.option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default="warning",
            envvar="AUTOPLAN_LOG_LEVEL",
            show_envvar=True,
            show_default=True,
            expose_value=False,
            callback=_set_level,
            help="What of the log goes to stderr.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


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


@cli.command()
@click.argument("function", metavar="FILE.py:FUNCTION")
@click.option("--cluster", required=True, help="KIND-HxD such as dgx-h100-2x8, or a JSON file.")
@_degree("--tp", "-tp", "--tensor-parallel-size", "tp", text="Pin the tensor-parallel degree.")
@_degree("--pp", "-pp", "--pipeline-parallel-size", "pp", text="Pin the number of stages.")
@_degree("--dp", "-dp", "--data-parallel-size", "dp", text="Pin the data-parallel degree.")
@click.option("--zero", type=click.IntRange(0, 3), help="Pin the ZeRO level.")
@_degree("--num-microbatches", text="Pin the number of microbatches.")
@click.option("--schedule", type=click.Choice(["gpipe", "1f1b"]), help="Pin the schedule.")
@click.option("--recompute/--no-recompute", default=None, help="Pin recomputation.")
@click.option("--stage-layers", callback=_parse_counts, help="Pin layers per stage, as 3,4.")
@click.option(
    "--placement",
    "placements",
    multiple=True,
    callback=_parse_placements,
    metavar="NAME=SPEC",
    help="Pin a parameter's sharding spec; NAME may hold *. Repeatable.",
)
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "sgd-momentum"]), default="adamw")
@click.option("--precision", type=click.Choice(["bf16-mixed"]), help="Default: the model's own.")
@click.option("--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True)
@click.option(
    "--memory-reserve",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    default=0.08,
    show_default=True,
    help="Fraction of every device that no plan may use.",
)
@click.option("--time-limit", type=click.FloatRange(min=0.0), default=60.0, show_default=True)
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Alternatives to keep.",
)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Save the plan here.")
@_common
def plan(
    function: str, cluster: str, output: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Plan the model that FUNCTION returns, as (model, inputs) or (model, inputs, loss_fn).

    The inputs are one global batch: a keyword dict or a positional tuple.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no result
        chosen = _optimize(function, cluster, quiet, options)
    if output is not None:
        chosen.save(output)
        if not quiet:
            click.echo(f"wrote {output}", err=True)
    click.echo(chosen.to_json() if as_json else chosen.summary(), nl=False)


def _optimize(function: str, cluster_name: str, quiet: bool, options: dict[str, Any]) -> Plan:
    """Calls the planner; the cluster is read first, for a wrong name costs nothing then."""
    from autoplan.api import Pins, optimize
    from autoplan.cluster import Cluster

    cluster = Cluster.load(cluster_name)
    model, inputs, loss_fn = _build(function)
    names = ("tp", "pp", "dp", "zero", "num_microbatches", "schedule", "recompute", "stage_layers")
    pins = Pins(**{name: options[name] for name in names}, placements=options["placements"])
    with _progress(quiet) as report:
        chosen: Plan = optimize(
            model,
            cluster,
            inputs,
            loss_fn=loss_fn,
            mode=options["mode"],
            optimizer=options["optimizer"],
            precision=options["precision"],
            pins=pins,
            memory_reserve=options["memory_reserve"],
            time_limit_s=options["time_limit"],
            top=options["top"],
            progress=report,
        )
    return chosen


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
def _progress(quiet: bool) -> Iterator[Callable[[str, float], None] | None]:
    """A bar on stderr where that is a terminal; else None, and the planner reports nothing."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.option("--stage", type=click.IntRange(min=0), help="Only this stage, in more detail.")
@click.option("--all", "everything", is_flag=True, help="Fold nothing, leave nothing out.")
@_common
def show(file: str, stage: int | None, everything: bool, as_json: bool, quiet: bool) -> None:
    """Print a plan as a page."""
    from autoplan.plan import Plan
    from autoplan.render import render_text

    document = Plan.load(file)
    page = render_text(document, stage=stage, all=everything)
    click.echo(document.to_json() if as_json else page, nl=False)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.argument("name")
@_common
def explain(file: str, name: str, as_json: bool, quiet: bool) -> None:
    """Say what was chosen for NAME: a parameter, a module, an op or "stage 0"."""
    from autoplan.plan import Plan

    text = Plan.load(file).explain(name)
    if as_json:
        _emit({"name": name, "text": text})
    else:
        click.echo(text, nl=False)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.option("--cluster", help="Check that the plan was made for this cluster.")
@_common
def validate(file: str, cluster: str | None, as_json: bool, quiet: bool) -> None:
    """Check a plan's document, and that it fits a cluster."""
    from autoplan.plan import Plan

    document = Plan.load(file)
    if cluster is not None:
        _check_cluster(document, cluster)
    if as_json:
        _emit({"valid": True, "plan": file, "cluster": document.cluster.name})
    else:
        click.echo(f"{file} is valid: {document.model.name} on {document.cluster.name}")


def _check_cluster(document: Plan, name: str) -> None:
    """Refuses a cluster other than the plan's, and says in what they differ."""
    from autoplan.cluster import Cluster

    cluster = Cluster.load(name)
    if cluster.digest == document.fingerprint.cluster:
        return
    planned = document.cluster
    pairs = {
        "device": (planned.device, cluster.device.name),
        "hosts": (planned.num_hosts, cluster.num_hosts),
        "devices per host": (planned.devices_per_host, cluster.devices_per_host),
        "memory in bytes": (planned.memory_bytes, cluster.device.memory_bytes),
    }
    differ = [f"{what} {a} against {b}" for what, (a, b) in pairs.items() if a != b]
    raise PlanError(
        f"the plan was made for cluster {planned.name}, not for {name}: "
        f"{', '.join(differ) or 'links or device speeds differ'}. Plan again for that cluster."
    )


@cli.command()
@click.option("--cluster", default="local-cpu-4", show_default=True, help="Processes to start.")
@click.option("--pins", default="", help='Pins, such as "tp=2,pp=2"; default: all is searched.')
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Save the plan here.")
@_common
def demo(
    cluster: str, pins: str, steps: int, output: str | None, as_json: bool, quiet: bool
) -> None:
    """Plan a small model, train it on CPU processes, and compare with one process."""
    from autoplan.demo import run_demo

    code = run_demo(cluster=cluster, pins=pins, steps=steps, output=output, json=as_json)
    click.get_current_context().exit(code)


def main() -> NoReturn:
    """Entry point of the `autoplan` command."""
    cli.main(prog_name="autoplan")
