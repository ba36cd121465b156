# SPDX-License-Identifier: Apache-2.0
"""Commands that run something on this machine: demo."""

from __future__ import annotations

import click

from autoplan.cli.group import cli, common


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
