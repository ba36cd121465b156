# SPDX-License-Identifier: Apache-2.0
"""The plan's ranks as torch process groups, and placements as DTensor's.

One `DeviceMesh` of axes (pp, dp, tp) over all stages; `Ranks` is one process's view of it. With one
device there is no process group at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoplan import placements
from autoplan.errors import PlanError
from autoplan.plan import Plan


@dataclass(frozen=True)
class Ranks:
    """Where this process stands in the plan.

    Attributes:
        device: Where its tensors live.
        stage: Its pipeline stage.
        coordinates: Its place on the stage's mesh axes, outermost first.
        axis_sizes: Sizes of these axes.
        mesh: The (pp, dp, tp) mesh, or None with one device.
    """

    device: torch.device
    stage: int
    coordinates: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    mesh: DeviceMesh | None

    @cached_property
    def stage_mesh(self) -> DeviceMesh:
        """The (dp, tp) mesh of this process's stage."""
        assert self.mesh is not None, "one device has no mesh"
        return self.mesh["dp", "tp"]

    @cached_property
    def groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The ranks along each mesh axis (0 is dp, 1 is tp)."""
        assert self.mesh is not None, "one device has no groups"
        return self.mesh.get_group("dp"), self.mesh.get_group("tp")

    def group(self, axis: int) -> dist.ProcessGroup:
        """The ranks along one mesh axis."""
        return self.groups[axis]

    @cached_property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks at this place of every stage's mesh, in stage order."""
        assert self.mesh is not None, "one device has no groups"
        return self.mesh.get_group("pp")


def check_world(plan: Plan) -> int:
    """The number of processes of this launch, which must be the plan's.

    Raises:
        PlanError: They differ; the message has both numbers.
    """
    layout = plan.layout
    wanted = layout.dp * layout.tp * layout.pp
    world = (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )
    if world != wanted:
        raise PlanError(
            f"the plan is for {wanted} processes (pp={layout.pp}, dp={layout.dp}, "
            f"tp={layout.tp}), this launch has {world}. Launch with torchrun --nproc-per-node so "
            f"that the total is {wanted}, or plan for {world} devices."
        )
    return world


def join(plan: Plan) -> Ranks:
    """This process's place in the plan; every process of the launch calls it once.

    Starts the process group if the launcher has not: NCCL with the device of LOCAL_RANK where CUDA
    has that many devices, gloo on the CPU where it has not.

    Raises:
        PlanError: The launch has another number of processes than the plan.
    """
    layout = plan.layout
    sizes = (layout.dp, layout.tp)
    world = check_world(plan)
    device = _device(world)
    if world == 1:
        return Ranks(device, 0, (0, 0), sizes, None)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    order = tuple(rank for stage in plan.stages for rank in stage.ranks)
    mesh = _mesh(dist.group.WORLD, device.type, order, (layout.pp, layout.dp, layout.tp))
    where = mesh.get_coordinate()
    assert where is not None, "every rank of the launch is in the plan"
    return Ranks(device, where[0], (where[1], where[2]), sizes, mesh)


@lru_cache(maxsize=8)
def _mesh(
    world: object, device_type: str, order: tuple[int, ...], sizes: tuple[int, int, int]
) -> DeviceMesh:
    """Process groups are dear: plans of one launch over the same ranks share theirs."""
    return DeviceMesh(
        device_type, torch.tensor(order).view(sizes), mesh_dim_names=("pp", "dp", "tp")
    )


def _device(world: int) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    backend = "nccl" if torch.cuda.device_count() >= per_host else "gloo"
    if dist.is_initialized():
        backend = str(dist.get_backend())
    if torch.cuda.is_available() and "nccl" in backend:
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")


def to_torch(spec: placements.ShardingSpec) -> list[Placement]:
    """A spec of plain splits as DTensor placements."""
    found: list[Placement] = []
    for placement in spec:
        if isinstance(placement, placements.Shard):
            assert placement.blocks == 1, "stored tensors are split plainly"
            found.append(Shard(placement.dim))
        else:
            found.append(Partial() if isinstance(placement, placements.Partial) else Replicate())
    return found
