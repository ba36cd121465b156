# SPDX-License-Identifier: Apache-2.0
"""Commands that read plans: show, draw, compare, explain, validate. None of them loads torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from autoplan.cli.group import cli, common, emit
from autoplan.errors import PlanError

if TYPE_CHECKING:
    from autoplan.plan import Plan


def _width(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Columns of the page; default: 80."
    return click.option("--width", type=click.IntRange(min=40), help=text)(command)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.option("--stage", type=click.IntRange(min=0), help="Only this stage, in more detail.")
@click.option("--all", "everything", is_flag=True, help="Fold nothing, leave nothing out.")
@_width
@common
def show(
    file: str, stage: int | None, everything: bool, width: int | None, as_json: bool, quiet: bool
) -> None:
    """Print a plan as a page."""
    from autoplan.plan import Plan
    from autoplan.render import render_text

    document = Plan.load(file)
    page = render_text(document, stage=stage, all=everything, width=width)
    click.echo(document.to_json() if as_json else page, nl=False)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(),
    help="A .png, .svg or .pdf picture, a .html page, or a .trace.json for Perfetto.",
)
@click.option(
    "--panel",
    type=click.Choice(["schedule", "memory", "model", "network"]),
    help="One panel of a picture; default: all four.",
)
@common
def draw(file: str, output: str, panel: str | None, as_json: bool, quiet: bool) -> None:
    """Draw a plan: where the time, the bytes and the traffic go."""
    from autoplan.plan import Plan
    from autoplan.render.draw import draw_file

    written = draw_file(Plan.load(file), output, panel=panel)
    if as_json:
        emit({"output": str(written), "size_bytes": written.stat().st_size})
    elif not quiet:
        click.echo(f"wrote {written}", err=True)


@cli.command()
@click.argument("files", metavar="PLAN...", type=click.Path(), nargs=-1, required=True)
@click.option("--all", "everything", is_flag=True, help="Every parameter placed differently.")
@_width
@common
def compare(
    files: tuple[str, ...], everything: bool, width: int | None, as_json: bool, quiet: bool
) -> None:
    """Compare plans with the first: what differs, and what it costs term by term."""
    from autoplan.plan import Plan
    from autoplan.render.compare import compare_data, compare_text

    plans = {file: Plan.load(file) for file in files}
    page = compare_text(plans, all=everything, width=width)
    if as_json:
        emit(compare_data(plans))
    else:
        click.echo(page, nl=False)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.argument("name")
@common
def explain(file: str, name: str, as_json: bool, quiet: bool) -> None:
    """Say what was chosen for NAME: a parameter, a module, an op or "stage 0"."""
    from autoplan.plan import Plan

    text = Plan.load(file).explain(name)
    if as_json:
        emit({"name": name, "text": text})
    else:
        click.echo(text, nl=False)


@cli.command()
@click.argument("file", metavar="PLAN", type=click.Path())
@click.option("--cluster", help="Check that the plan was made for this cluster.")
@common
def validate(file: str, cluster: str | None, as_json: bool, quiet: bool) -> None:
    """Check a plan's document, and that it fits a cluster."""
    from autoplan.plan import Plan

    document = Plan.load(file)
    if cluster is not None:
        _check_cluster(document, cluster)
    if as_json:
        emit({"valid": True, "plan": file, "cluster": document.cluster.name})
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
