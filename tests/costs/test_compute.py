# SPDX-License-Identifier: Apache-2.0
"""Kernel times: closed forms on an ideal machine, curves, monotonicity, published speeds."""

from __future__ import annotations

import itertools
import math

import pytest

from autoplan.cluster import Cluster, Curve, DeviceSpec, KernelSpec
from autoplan.costs.compute import kernel_time
from autoplan.costs.profile import FAMILIES, DeviceProfile, Profiles
from autoplan.errors import ProfileError


def ideal(bytes_per_s: float = math.inf, kernel: KernelSpec | None = None) -> DeviceProfile:
    spec = DeviceSpec(
        name="ten-teraflop",
        memory_bytes=2**30,
        memory_bytes_per_s=bytes_per_s,
        peak_flop_per_s={"float32": 1e13, "bfloat16": 1e14},
        kernel=kernel or KernelSpec(),
    )
    return DeviceProfile.of(spec)


@pytest.mark.parametrize("family", ["matmul", "convolution", "attention", "memory"])
def test_ideal_device_reaches_its_peak(family: str) -> None:
    """USERS T06: 10 TFLOP/s, unlimited memory bandwidth, no launch cost."""
    cost = kernel_time(ideal(), family, 2e10, 1e9, "float32")
    assert cost.time_s == pytest.approx(2e-3, rel=1e-12)
    assert cost.source == "roofline"


def test_t06a_linear_step_time() -> None:
    """USERS T06a: 8 Linear(1024, 1024) on 262,144 rows, forward and backward, one GPU: 1.32 s."""
    matmul_s = kernel_time(ideal(), "matmul", 2 * 262144 * 1024 * 1024, 0, "float32").time_s
    assert 3 * 8 * matmul_s == pytest.approx(1.32, rel=0.005)


def test_bytes_bind_where_they_are_many() -> None:
    assert kernel_time(ideal(1e12), "matmul", 1e7, 4e9, "float32").time_s == pytest.approx(4e-3)
    assert kernel_time(ideal(1e12), "memory", 1e9, 4e9, "float32").time_s == pytest.approx(4e-3)


def test_views_are_free_and_nothing_else_is() -> None:
    profile = ideal(1e12, KernelSpec(launch_s=3e-6))
    assert kernel_time(profile, "view", 0, 0, "float32").time_s == 0.0
    for family in FAMILIES[:-1]:
        assert kernel_time(profile, family, 0, 0, "float32").time_s == 3e-6


def test_half_the_efficiency_at_the_half_size() -> None:
    kernel = KernelSpec(matmul=Curve(0.8, 1e10), memory=Curve(0.5, 1e6))
    profile = ideal(1e12, kernel)
    matmul = kernel_time(profile, "matmul", 1e10, 0, "float32")
    assert 1e10 / matmul.time_s == pytest.approx(0.4 * 1e13)
    large = kernel_time(profile, "matmul", 1e16, 0, "float32")
    assert 1e16 / large.time_s == pytest.approx(0.8 * 1e13, rel=1e-5)
    assert 1e6 / kernel_time(profile, "memory", 0, 1e6, "float32").time_s == pytest.approx(0.25e12)


@pytest.mark.parametrize("kind", ["dgx-v100-1x1", "dgx-a100-1x1", "dgx-b200-1x1", "local-cpu-2"])
@pytest.mark.parametrize("family", FAMILIES[:-1])
def test_more_work_is_never_faster(kind: str, family: str) -> None:
    profile = Profiles.of(Cluster.load(kind)).device
    sizes = (0.0, *(4.0**k for k in range(26)))
    for dtype in ("bfloat16", "float32", "int64", "float64"):
        times = {
            (flop, size): kernel_time(profile, family, flop, size, dtype).time_s
            for flop, size in itertools.product(sizes, sizes)
        }
        for small, large in itertools.pairwise(sizes):
            for other in sizes:
                assert 0 < times[small, other] <= times[large, other]
                assert times[other, small] <= times[other, large]


def test_guessed_numbers_are_called_so() -> None:
    guessed = ideal(kernel=KernelSpec(matmul=Curve(0.8, 0.0, "assumed")))
    assert kernel_time(guessed, "matmul", 1e12, 0, "float32").source == "assumed"
    assert kernel_time(guessed, "attention", 1e12, 0, "float32").source == "roofline"
    assert kernel_time(ideal(), "matmul", 1e12, 0, "float64").source == "assumed"


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ProfileError, match="matmul, convolution"):
        kernel_time(ideal(), "gemm", 1.0, 1.0, "float32")


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "tflop_per_s", "tolerance"),
    [
        # stas00/ml-engineering compute/accelerator/README.md, maximum achievable matmul table
        ("dgx-a100-1x1", 1024, 10240, 5120, 271.2, 0.12),
        ("dgx-h100-1x1", 2048, 2048, 13312, 794.5, 0.12),
        ("dgx-b200-1x1", 1792, 16128, 3072, 1745.0, 0.12),
        # EleutherAI/cookbook benchmarks/sizing/sample_results/transformer.out and mm.out
        ("dgx-a100-1x1", 8192, 12288, 4096, 241.6, 0.12),
        ("dgx-a100-1x1", 8192, 4096, 4096, 234.9, 0.12),
    ],
)
def test_published_matmuls(
    kind: str, m: int, n: int, k: int, tflop_per_s: float, tolerance: float
) -> None:
    profile = DeviceProfile.of(Cluster.load(kind).device)
    flop, size = 2.0 * m * n * k, 2.0 * (m * n + n * k + m * k)
    cost = kernel_time(profile, "matmul", flop, size, "bfloat16", (1, m, n, k))
    assert flop / cost.time_s / 1e12 == pytest.approx(tflop_per_s, rel=tolerance)


@pytest.mark.parametrize(
    ("kind", "seq_len", "tflop_per_s"),
    [
        # Dao-AILab/flash-attention assets/flash2_{a100,h100}_fwd_bwd_benchmark.png, head 128
        ("dgx-a100-1x1", 2048, 155.0),
        ("dgx-a100-1x1", 16384, 189.0),
        ("dgx-h100-1x1", 2048, 265.0),
        ("dgx-h100-1x1", 16384, 328.0),
    ],
)
def test_published_attention(kind: str, seq_len: int, tflop_per_s: float) -> None:
    """16k tokens, hidden size 2048; backward counts 2.5 forwards."""
    profile = DeviceProfile.of(Cluster.load(kind).device)
    forward = 4.0 * 16384 * seq_len * 2048 / 2
    flops, shape = (forward, 2.5 * forward), (seq_len, 128, 1)
    time_s = sum(kernel_time(profile, "attention", f, 0, "float16", shape).time_s for f in flops)
    assert sum(flops) / time_s / 1e12 == pytest.approx(tflop_per_s, rel=0.07)
