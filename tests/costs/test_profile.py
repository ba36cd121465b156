# SPDX-License-Identifier: Apache-2.0
"""What the cost functions read: peaks by dtype, rates by collective, measured tables."""

from __future__ import annotations

import math

import pytest

from autoplan.cluster import Cluster, DeviceSpec, KernelSpec, Link
from autoplan.costs.profile import Cost, DeviceProfile, LinkProfile, Profiles

MIB = 2.0**20
TABLE = (("all_reduce", 2, ((MIB, 40e-6), (4 * MIB, 80e-6))),)


def device(**peaks: float) -> DeviceProfile:
    spec = DeviceSpec(name="d", memory_bytes=1, memory_bytes_per_s=1e12, peak_flop_per_s=peaks)
    return DeviceProfile.of(spec)


def test_peak_of_a_stated_dtype() -> None:
    assert device(bfloat16=4e14, float32=2e13).peak("bfloat16") == (4e14, True)


def test_integers_count_as_float32() -> None:
    assert device(bfloat16=4e14, float32=2e13, float64=1e13).peak("int64") == (2e13, True)


def test_unstated_float_takes_the_lowest_peak_and_says_so() -> None:
    assert device(bfloat16=4e14, float32=2e13).peak("float64") == (2e13, False)


def test_rate_by_collective_number_of_ranks_and_device() -> None:
    link = LinkProfile(
        Link(
            latency_s=0.0,
            bytes_per_s=100e9,
            device_bytes_per_s=25e9,
            efficiency=(("all", 0.5), ("send", 0.8)),
            rank_efficiency=((3, 0.1),),
        )
    )
    assert link.rate("all_gather", 2) == pytest.approx(50e9)
    assert link.rate("send", 2) == pytest.approx(80e9)
    assert link.rate("send", 3) == pytest.approx(10e9)
    assert link.device_rate("all_gather", 2) == pytest.approx(12.5e9)


def test_tables_interpolate_on_a_logarithmic_scale() -> None:
    link = LinkProfile(Link(latency_s=0.0, bytes_per_s=1.0, tables=TABLE))
    assert link.measured("all_reduce", 2, 4 * MIB) == Cost(80e-6, "measured")
    middle = link.measured("all_reduce", 2, 2 * MIB)
    assert middle is not None
    assert middle.time_s == pytest.approx(math.sqrt(40e-6 * 80e-6))
    assert middle.source == "interpolated"
    assert link.measured("all_reduce", 2, 1.0) == Cost(40e-6, "interpolated")
    above = link.measured("all_reduce", 2, 8 * MIB)
    assert above is not None
    assert above.time_s == pytest.approx(160e-6)


def test_tables_serve_their_own_collective_only() -> None:
    """USERS R69: point-to-point and collective bandwidth disagree, so rows are separate."""
    link = LinkProfile(Link(latency_s=0.0, bytes_per_s=1.0, tables=TABLE))
    assert link.measured("send", 2, MIB) is None
    assert link.measured("all_reduce", 4, MIB) is None


def test_profiles_of_a_cluster() -> None:
    cluster = Cluster.load("dgx-h100-2x8")
    profiles = Profiles.of(cluster)
    assert profiles.digest == cluster.digest
    sustained = cluster.device.kernel.sustained
    assert 0.7 < sustained <= 1.0
    assert profiles.device.peak("bfloat16")[0] == pytest.approx(sustained * 989.4e12)
    assert profiles.intra.link.name == "nvlink4"
    assert profiles.inter is not None
    assert profiles.pair is None
    assert Profiles.of(Cluster.load("dgx-h100-2x8")) is profiles
    assert Profiles.of(Cluster.load("local-cpu-2")).inter is None


def test_a_plain_description_is_an_ideal_machine() -> None:
    profile = device(float32=1e13)
    assert profile.launch_s == 0.0
    assert {curve.share for curve in profile.curves.values()} == {1.0}
    assert KernelSpec().memory.half == 0.0
