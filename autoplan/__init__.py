# SPDX-License-Identifier: Apache-2.0
"""autoplan: the automatic parallelization planner for PyTorch.

    plan = autoplan.optimize(model, autoplan.Cluster.load("dgx-h100-2x8"), example_inputs)
    parallel = autoplan.parallelize(model, plan)          # under torchrun

Importing this loads no torch; `optimize` and `parallelize` do.
"""

from autoplan.api import optimize, parallelize, register_rule
from autoplan.api_pins import Pins
from autoplan.cluster import Cluster
from autoplan.errors import (
    AutoplanError,
    CaptureError,
    ClusterError,
    ExecutionError,
    InfeasibleError,
    PlanError,
    ProfileError,
    UnsupportedOpError,
)
from autoplan.plan import Plan

__all__ = [
    "AutoplanError",
    "CaptureError",
    "Cluster",
    "ClusterError",
    "ExecutionError",
    "InfeasibleError",
    "Pins",
    "Plan",
    "PlanError",
    "ProfileError",
    "UnsupportedOpError",
    "optimize",
    "parallelize",
    "register_rule",
]
