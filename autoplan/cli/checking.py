# SPDX-License-Identifier: Apache-2.0
"""Commands that hold the cost model against measurements: check."""

from __future__ import annotations

import click

from autoplan.cli.group import cli, common, emit
from autoplan.cli.planning import progress


@cli.command()
@click.argument("file", metavar="RUNS.csv", type=click.Path(dir_okay=False))
@click.option("--source", "sources", multiple=True, help="Only ids that start so. Repeatable.")
@click.option("--rows", is_flag=True, help="Every row, too.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw predicted over measured.")
@click.option(
    "--accuracy",
    type=click.Path(dir_okay=False),
    help="Write the errors by device and runtime here, as plans state them.",
)
@common
def check(
    file: str,
    sources: tuple[str, ...],
    rows: bool,
    plot: str | None,
    accuracy: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Predict the runs of a table and compare with what was measured.

    The columns are in profiles/README.md, "Runs". Rows that cannot be expressed are listed.
    """
    from autoplan.check.report import document, render, write_accuracy
    from autoplan.check.rows import read_runs
    from autoplan.check.sweep import sweep

    runs = [r for r in read_runs(file) if not sources or r.id.startswith(sources)]
    with progress(quiet) as report:
        swept = sweep(runs, report)
    if plot is not None:
        from autoplan.render.accuracy import draw_accuracy

        points = [(p.run.prefix, p.measured_s, p.step_s) for p in swept.predictions if p.measured_s]
        draw_accuracy(points, plot)
    if accuracy is not None:
        write_accuracy(swept, accuracy)
    if as_json:
        emit(document(swept))
    else:
        click.echo(render(swept, rows=rows), nl=False)
