# SPDX-License-Identifier: Apache-2.0
"""Gloo processes on this machine, in two ways.

`run(world, function, *args)` calls `function(rank, *args)` on every rank of a reused pool and gives
the results in rank order: start-up dominates, so tests of one world size share it. A job that
raises on a rank, or hangs, ends the pool (its peers may wait in a collective); the next job starts
a fresh one.

`run_forked(...)` forks this process instead, once per job: for a process of one thread that has
already built what the job needs (a model, a capture, a plan) and never ran a backward.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

JOB_TIMEOUT_S = 240.0
_context = multiprocessing.get_context("spawn")
_pools: dict[int, Pool] = {}


class RemoteError(AssertionError):
    """A rank raised; its traceback is the message. `.kind` is the exception's class name."""

    def __init__(self, rank: int, kind: str, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.kind = kind


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    import warnings

    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            dist.destroy_process_group()
            return
        function, args = job
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException as error:  # everything a job raises goes to the test that started it
            pipe.send((False, (type(error).__name__, traceback.format_exc())))


class Pool:
    """`world` processes with one process group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, world, store, theirs), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., object], args: tuple[object, ...]) -> list[object]:
        """Results in rank order."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results: dict[int, object] = {}
        while len(results) < self.world:
            ready = wait([p for r, p in enumerate(self.pipes) if r not in results], JOB_TIMEOUT_S)
            if not ready:
                raise TimeoutError(
                    f"ranks {[r for r in range(self.world) if r not in results]} "
                    f"did not finish in {JOB_TIMEOUT_S} s"
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                good, value = pipe.recv()  # type: ignore[union-attr]
                if not good:
                    raise RemoteError(rank, *value)
                results[rank] = value
        return [results[r] for r in range(self.world)]

    def close(self) -> None:
        """Ends the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def run(world: int, function: Callable[..., object], *args: object) -> list[object]:
    """`function(rank, *args)` on `world` ranks; results in rank order.

    Raises:
        RemoteError: A rank raised.
        TimeoutError: The job hung.
    """
    pool = _pools.get(world)
    if pool is None:
        pool = _pools[world] = Pool(world)
    try:
        return pool.run(function, args)
    except (RemoteError, TimeoutError):
        _pools.pop(world).close()
        raise


def _fork_body(
    rank: int, world: int, store: str, pipe: Connection, function: Callable[..., object], args: Any
) -> None:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        pipe.send((True, function(rank, *args)))
        dist.destroy_process_group()
    except BaseException as error:  # everything a job raises goes to the process that started it
        pipe.send((False, (type(error).__name__, traceback.format_exc())))
    pipe.close()
    os._exit(0)


def run_forked(
    world: int, function: Callable[..., object], *args: object, timeout_s: float = JOB_TIMEOUT_S
) -> list[object]:
    """`function(rank, *args)` on `world` forks of this process; results in rank order.

    Raises:
        RemoteError: A rank raised, or ended without a result.
        TimeoutError: The job hung.
    """
    context = multiprocessing.get_context("fork")
    results: dict[int, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            job = (rank, world, str(Path(folder) / "store"), theirs, function, args)
            process = context.Process(target=_fork_body, args=job, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        end = time.monotonic() + timeout_s
        try:
            while len(results) < world:
                waiting = [p for r, p in enumerate(pipes) if r not in results]
                ready = wait(waiting, max(0.0, end - time.monotonic()))
                if not ready:
                    raise TimeoutError(
                        f"ranks {[r for r in range(world) if r not in results]} "
                        f"did not finish in {timeout_s} s"
                    )
                for pipe in ready:
                    rank = pipes.index(pipe)  # type: ignore[arg-type]
                    try:
                        good, value = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        raise RemoteError(rank, "EOFError", "ended without a result") from None
                    if not good:
                        raise RemoteError(rank, *value)
                    results[rank] = value
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    return [results[r] for r in range(world)]


@atexit.register
def close_all() -> None:
    """Ends every pool."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()
