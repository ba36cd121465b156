# SPDX-License-Identifier: Apache-2.0
"""Every exception autoplan raises on purpose. A message says what is wrong, what was expected, what
to do.

AutoplanError
  CaptureError            the model could not be turned into a Graph
    UnsupportedOpError    an op has no dimension rule
  ClusterError            (also ValueError) the cluster description is inconsistent
  ProfileError            (also ValueError) a profile is missing, malformed, or of another device
  InfeasibleError         no plan fits
  PlanError               (also ValueError) a plan does not fit its schema, model or cluster
  ExecutionError          a running plan broke
"""

from __future__ import annotations


class AutoplanError(Exception):
    """Base of the family: catching it catches everything autoplan raises on purpose."""


class CaptureError(AutoplanError):
    """The model could not be turned into a Graph; the message names the module path and the
    reason.
    """


class UnsupportedOpError(CaptureError):
    """An op has no dimension rule."""

    def __init__(self, op: str, target: str, module_path: str, reason: str) -> None:
        super().__init__(
            f"no dimension rule for {target} ({op} in {module_path or 'the root module'}): {reason}"
        )
        self.op = op
        self.target = target
        self.module_path = module_path


class ClusterError(AutoplanError, ValueError):
    """The cluster description is inconsistent, or names something that is not known."""


class ProfileError(AutoplanError, ValueError):
    """A profile is missing, malformed, or of another device."""


class InfeasibleError(AutoplanError):
    """No plan fits: memory, divisibility or pins leave nothing.

    Attributes:
        stage: Index of the stage that does not fit, or None when no stage exists yet.
        required_bytes: Least bytes a device would need, or None when memory is not the reason.
        available_bytes: Bytes a device has for the plan, or None.
        candidates: (layout, reason) of every layout that was tried.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        required_bytes: float | None = None,
        available_bytes: float | None = None,
        candidates: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes
        self.candidates = candidates


class PlanError(AutoplanError, ValueError):
    """A plan does not fit its schema, its model or its cluster."""


class ExecutionError(AutoplanError):
    """A running plan broke.

    Attributes:
        rank: The process that saw it.
        stage: Its pipeline stage.
        microbatch: The microbatch at hand, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
