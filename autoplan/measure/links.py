# SPDX-License-Identifier: Apache-2.0
"""Links: the executor's own collectives over every shape of group, by the wall.

All groups of a shape run at once, as they do along a mesh axis. Every process of the launch takes
part; rank 0 gets the result. The sums that gloo gets in one exchange are timed as such, for what is
timed is `executor/collectives.py` itself. The median batch stands, not the best: what a collective
waits for, a peer that has no core just then, it waits for in a step as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoplan.executor.collectives import ONE_SHOT_BYTES, run_moves
from autoplan.executor.meshes import Ranks
from autoplan.measure.clock import BATCHES, Row, Timing, from_walls, summarize
from autoplan.placements import Partial, Replicate, Shard
from autoplan.sharding.resharding import Move

Tensor = torch.Tensor
Point = tuple[float, float]  # bytes, seconds

KB = 1024
SIZES = (
    (KB, 16 * KB, 128 * KB, ONE_SHOT_BYTES, 2 * ONE_SHOT_BYTES, 2048 * KB),
    (4 * KB, 64 * KB, 1024 * KB, 4096 * KB, 16384 * KB),
)
MOVES = {
    "all_reduce": Move("all_reduce", 0, Partial(), Replicate(), 1.0),
    "all_gather": Move("all_gather", 0, Shard(0), Replicate(), 1.0),
    "reduce_scatter": Move("reduce_scatter", 0, Partial(), Shard(0), 1.0),
    "all_to_all": Move("all_to_all", 0, Shard(0), Shard(1), 1.0),
}


@dataclass
class LinkTimings:
    """What was measured of the links.

    Attributes:
        intra, inter: Collective -> number of ranks -> its points, inside a host and across hosts.
        rows: For the report.
    """

    intra: dict[str, dict[int, list[Point]]] = field(default_factory=dict)
    inter: dict[str, dict[int, list[Point]]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of `size` ranks, `stride` apart: `size` neighbours where stride is 1."""

    size: int
    stride: int
    crosses: bool

    def __str__(self) -> str:
        where = "across hosts" if self.crosses else "inside a host"
        return f"{self.size} ranks {where}"


def shapes(world: int, per_host: int) -> list[Shape]:
    """The shapes of group that meshes of a launch have: powers of two (and all) of neighbours
    inside a host; across hosts, one rank of each or all of them.
    """
    sizes = [s for s in (2, 4, 8, 16) if s < per_host and per_host % s == 0]
    if per_host > 1:
        sizes.append(per_host)
    found = [Shape(size, 1, False) for size in sizes]
    hosts = world // per_host
    if hosts > 1:
        across = Shape(hosts, per_host, True)
        found += [across] + ([Shape(world, 1, True)] if per_host > 1 else [])
    return found


def measure_links(
    device: torch.device, per_host: int, *, quick: bool, batch_s: float = 0.03
) -> LinkTimings:
    """Times the links; every process of the launch calls it, after the process group.

    Args:
        device: Where the tensors are.
        per_host: Processes on each host, ranks numbered host by host.
        quick: Fewer sizes.
        batch_s: Seconds of each of the batches of a point.
    """
    found, world = LinkTimings(), dist.get_world_size()
    sizes = sorted(SIZES[0] if quick else SIZES[0] + SIZES[1])
    for shape in shapes(world, per_host):
        tables = found.inter if shape.crosses else found.intra
        ranks = _ranks(device, world, shape)
        for kind, move in MOVES.items():
            timings = []
            points = tables.setdefault(kind, {}).setdefault(shape.size, [])
            for size in sizes:
                x = _local(kind, size, shape.size, device)
                timing = _time(partial(run_moves, x, (move,), ranks), device, batch_s)
                timings.append(timing)
                points.append((float(size), timing.median_s))
            found.rows.append(summarize(f"{kind}, {shape}", timings))
        if shape.size == 2:
            group = ranks.group(0)
            timings = [_send(size, group, device, batch_s) for size in sizes]
            points = [(float(s), t.median_s) for s, t in zip(sizes, timings)]
            tables.setdefault("send", {})[2] = points
            found.rows.append(summarize(f"send, {shape}", timings))
    return found


def _ranks(device: torch.device, world: int, shape: Shape) -> Ranks:
    """This process's place where the first axis runs along the shape's groups."""
    blocks = torch.arange(world).view(-1, shape.size, shape.stride)
    order = blocks.movedim(1, 0).reshape(1, shape.size, -1)
    mesh = DeviceMesh(device.type, order, mesh_dim_names=("pp", "dp", "tp"))
    where = mesh.get_coordinate()
    assert where is not None, "every rank is in the mesh"
    sizes = (shape.size, world // shape.size)
    return Ranks(device, 0, (where[1], where[2]), sizes, mesh)


def _local(kind: str, size_bytes: int, num_ranks: int, device: torch.device) -> Tensor:
    """A rank's tensor of a collective of so many bytes, which count as in `collective_time`."""
    columns = 32 if kind == "all_to_all" else 1
    rows = size_bytes // 4 // columns
    if kind == "all_gather":
        rows //= num_ranks
    return torch.ones(max(rows, num_ranks), columns, device=device)


def _time(call: Callable[[], object], device: torch.device, batch_s: float) -> Timing:
    """Wall seconds of a call that all ranks make together."""
    call()
    count = _agreed(max(1.0, batch_s / max(_wall_s(call, device, 2), 1e-6)))
    walls = [_wall_s(call, device, count) for _ in range(BATCHES)]
    return from_walls(walls, BATCHES * count)


def _agreed(count: float) -> int:
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, count)
    return max(1, min(1000, int(min(float(str(c)) for c in every))))


def _wall_s(call: Callable[[], object], device: torch.device, count: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _send(
    size_bytes: int, group: dist.ProcessGroup, device: torch.device, batch_s: float
) -> Timing:
    """Seconds of one message between the two ranks of each group: half of there and back."""
    x = torch.ones(size_bytes // 4, device=device)
    first = dist.get_rank(group) == 0

    def there_and_back() -> None:
        for sends in (first, not first):
            if sends:
                dist.send(x, group=group, group_dst=int(first))
            else:
                dist.recv(x, group=group, group_src=int(first))

    timing = _time(there_and_back, device, batch_s)
    return Timing(timing.best_s / 2, timing.median_s / 2, timing.num_calls)
