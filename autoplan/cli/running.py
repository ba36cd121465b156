# SPDX-License-Identifier: Apache-2.0
"""Commands that run something on this machine: demo, profile."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autoplan.cli.group import cli, common, emit
from autoplan.errors import ClusterError


@cli.command()
@click.option("--cluster", default="local-cpu-4", show_default=True, help="Processes to start.")
@click.option("--pins", default="", help='Pins, such as "tp=2,pp=2"; default: all is searched.')
@click.option("--steps", type=click.IntRange(min=1), default=30, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Save the plan here.")
@common
def demo(
    cluster: str, pins: str, steps: int, output: str | None, as_json: bool, quiet: bool
) -> None:
    """Plan a small model, train it on CPU processes, and compare with one process."""
    from autoplan.demo import run_demo

    code = run_demo(cluster=cluster, pins=pins, steps=steps, output=output, json=as_json)
    click.get_current_context().exit(code)


@cli.command()
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), required=True, help="The cluster file."
)
@click.option("--quick", is_flag=True, help="Fewer points: under a minute.")
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="To start here; default: one for each CUDA device, else for each core.",
)
@common
def profile(output: str, quick: bool, processes: int | None, as_json: bool, quiet: bool) -> None:
    """Measure this machine and write a cluster file; under torchrun, all its machines."""
    from autoplan.measure.launch import default_processes, measure_cluster

    path = Path(output)
    is_new = not path.exists()
    try:
        path.open("a").close()  # before minutes are spent
        if is_new:
            path.unlink(missing_ok=True)  # every rank of an outer torchrun tries
    except OSError as problem:
        raise ClusterError(
            f"cannot write {output}: {problem.strerror}. Give a path in a folder that exists."
        ) from problem
    if not quiet:
        click.echo("measuring; a few minutes, --quick takes one", err=True)
    found = measure_cluster(processes or default_processes(), quick=quick)
    if found is None:  # another rank of an outer torchrun writes
        return
    path.write_text(json.dumps(found["cluster"], indent=1) + "\n")
    if as_json:
        emit({"output": output, **found})
        return
    click.echo(f"{'measured':<46}{'points':>7}{'least us':>12}{'most us':>12}{'spread':>8}")
    for row in found["rows"]:
        least, most = row["least_s"] * 1e6, row["most_s"] * 1e6
        click.echo(
            f"{row['what']:<46}{row['num_points']:>7}{least:>12.1f}{most:>12.1f}"
            f"{row['spread']:>8.0%}"
        )
    click.echo(f"wrote {output}: autoplan plan FILE.py:FUNCTION --cluster {output}")
