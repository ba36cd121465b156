# SPDX-License-Identifier: Apache-2.0
"""The group of commands: exit codes, one-line errors, the options that every command has.

In come arguments, out goes an exit code: 0, 2 bad input, 3 infeasible, 1 internal, 130 interrupted.
Errors, logs and progress go to stderr, and with --json one document says on stdout what went wrong.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from autoplan.errors import CaptureError, ClusterError, InfeasibleError, PlanError, ProfileError

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
        emit(document)
    return code


def emit(document: object) -> None:
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


def common(command: Callable[..., Any]) -> Callable[..., Any]:
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
