# SPDX-License-Identifier: Apache-2.0
"""A published run in the planner's words: degrees, cluster, framework, sizes of the model.

In: a row. Out: a `Case`. What a model's name says beyond its sizes stands in
`profiles/architectures.json`, what its source says of the framework in `profiles/runtimes/`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from autoplan.check.machines import cluster_of
from autoplan.check.models import Sizes
from autoplan.check.rows import Degrees, NotExpressedError, Run, degrees_of
from autoplan.cluster import Cluster, Link
from autoplan.cluster_format import profiles_dir
from autoplan.runtime import Runtime, runtime, runtime_of
from autoplan.solver.candidate import Priced
from autoplan.units import GIB

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "tf32": "tfloat32",
    "fp8": "bfloat16",
    "mxfp8": "bfloat16",
    "fp8-cs": "bfloat16",
    "fp8-mx": "bfloat16",
    "": "bfloat16",
}
ADAM_BYTES = 8.0  # of a parameter's two float32 states
LEVELS = {r"grad_op|zero.?2": 2, r"fsdp|zero.?3|full_shard": 3, r"zero.?1": 1, "none": 0}


class Architecture(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a model's name says beyond its sizes; see `Sizes`.

    Attributes:
        filled: Stated length of a sequence -> share of it that is no padding; 1 where absent.
        refuse: Why it is not expressed.
    """

    name: str
    gated: bool = True
    biased: bool = False
    rms: bool = True
    rotary: bool = True
    causal: bool = True
    tied: bool = False
    predicted: float = 1.0
    dropout: float = 0.0
    norm_after: bool = False
    head_dim: int = 0
    experts: int = 0
    top_k: int = 0
    filled: dict[int, float] = {}
    refuse: str = ""


@lru_cache(maxsize=1)
def architectures() -> tuple[Architecture, ...]:
    """Of `profiles/architectures.json`; the first whose pattern is in a model's name counts."""
    text = (profiles_dir() / "architectures.json").read_bytes()
    return msgspec.json.decode(text, type=tuple[Architecture, ...])


@dataclass(frozen=True)
class Case:
    """A run in the planner's words.

    Attributes:
        degrees, cluster, traits, sizes: Of the run.
        recomputes: What may be recomputed: as stated, or what is tried in turn.
        float8: The products of the blocks run in float8.
    """

    degrees: Degrees
    cluster: Cluster
    traits: Runtime
    sizes: Sizes
    recomputes: tuple[str, ...]
    float8: bool

    @property
    def least_s(self) -> float:
        """Seconds of the step's products at the peak, without recomputation."""
        sizes, degrees = self.sizes, self.degrees
        peaks = self.cluster.device.peak_flop_per_s
        rates = [peaks.get(sizes.dtype, min(peaks.values()))]
        rates += [rate for dtype, rate in peaks.items() if self.float8 and "float8" in dtype]
        weights = sizes.num_parameters - sizes.vocab * sizes.hidden * (1 if sizes.tied else 2)
        passes = 4.0 if sizes.frozen else 6.0
        flop = passes * weights * degrees.batch * sizes.seq * degrees.cp
        return flop / (max(rates) * degrees.tp * degrees.pp * degrees.dp * degrees.cp)

    def memory_bytes(self, priced: Priced) -> float:
        """Peak of a device, in the schedule or in the optimizer's step, with what the framework
        takes beside the plan.
        """
        peak = priced.peak_bytes
        for first, last in priced.assignment.bounds if self.traits.step_bytes else ():
            stage = priced.prices[first:last]
            held = sum(price.held_bytes for price in stage)
            states = sum(price.state_bytes for price in stage)
            peak = max(peak, held + self.traits.step_bytes * states / ADAM_BYTES)
        return peak * (1.0 + self.traits.fragmentation) + self.traits.reserve_GiB * GIB


def case_of(run: Run) -> Case:
    """The case of a run.

    Raises:
        NotExpressedError: The row does not say enough, or asks for what the cost model lacks.
    """
    degrees = degrees_of(run)
    stated = run.text("recompute").strip()
    recomputes: tuple[str, ...] = (stated,)
    if stated not in ("none", "selective", "full"):
        recomputes = ("none", "selective")
        run.assumed.append("the least recomputation that fits")
    traits = _for_row(runtime_for(run), run)
    sizes = sizes_of(run, degrees, fused=traits.fused_attention, bins=traits.bins)
    sizes = replace(sizes, packed=traits.packs_qkv)
    float8 = "fp8" in run.text("precision")
    cluster = cluster_of(run)
    if cluster.inter_host is not None and traits.network < 1.0:
        cluster = replace(cluster, inter_host=_shared(cluster.inter_host, traits.network))
    return Case(degrees, cluster, traits, sizes, recomputes, float8)


def _shared(link: Link, share: float) -> Link:
    """The link as a framework's collectives use it."""
    own = link.device_bytes_per_s
    return replace(
        link,
        bytes_per_s=link.bytes_per_s * share,
        device_bytes_per_s=None if own is None else own * share,
    )


def runtime_for(run: Run) -> Runtime:
    """The framework that made a run: by its source, then its notes, then its plan."""
    zero = _stated_level(run)
    stated = f"{run.text('source')}; {run.text('notes')}"
    for text in (stated, run.text("fsdp_or_zero")):
        found = runtime_of(text, zero or 0)
        if found is not None:
            return found
    run.assumed.append("the framework")
    if run.text("attention_kernel") == "unfused":
        return runtime("megatron-2021")
    parallel = run.count("tp", 1) * run.count("pp", 1) > 1
    return runtime("megatron-core" if parallel else "fsdp")


def _for_row(traits: Runtime, run: Run) -> Runtime:
    """The framework's traits, with what the row says of them."""
    stated = run.text("sequence_parallel").strip().lower()
    if stated == "no" and traits.sequence_parallel:
        return msgspec.structs.replace(traits, sequence_parallel=False)
    return traits


def sizes_of(run: Run, degrees: Degrees, *, fused: bool = True, bins: int | None = None) -> Sizes:
    """The model of a run at its microbatch; `fused`: attention is, where the row does not say it;
    `bins`: to what sequences are filled up, see `Runtime`.

    Raises:
        NotExpressedError: A size is not stated, or the model is of a kind that is not expressed.
    """
    name = run.text("model")
    kind = next(a for a in architectures() if re.search(a.name, name, re.IGNORECASE))
    if kind.refuse:
        raise NotExpressedError(kind.refuse)
    if "power-limited" in run.text("notes"):
        raise NotExpressedError("the device ran below a power limit that the source does not state")
    if "offload" in run.text("notes"):
        raise NotExpressedError("states or activations are offloaded to the host's memory")
    precision = run.text("precision").strip()
    if precision not in DTYPES:
        raise NotExpressedError(f"precision {precision!r} is not expressed")
    hidden, heads = run.count("hidden"), run.count("heads")
    ffn = run.count("ffn_hidden", 4 * hidden)
    for what, number in (("heads", heads), ("ffn_hidden", ffn)):
        if number % degrees.tp:
            raise NotExpressedError(
                f"{degrees.tp} tensor parallel ranks do not divide {what} {number}"
            )
    # ranks beyond the key-value heads hold copies of them
    kv_heads = max(run.count("kv_heads", heads), degrees.tp)
    if heads % kv_heads:
        raise NotExpressedError(f"{kv_heads} key-value heads do not divide {heads} heads")
    seq = _computed_tokens(run.count("seq_len"), kind, bins)
    if seq % degrees.cp:
        raise NotExpressedError(f"{degrees.cp} context ranks do not divide {seq} tokens")
    experts, top_k = _experts_of(run, kind)
    if experts and (degrees.ep > degrees.dp * degrees.cp or experts % degrees.ep):
        raise NotExpressedError(
            f"{degrees.ep} expert ranks do not fit {experts} experts on {degrees.dp} ranks"
        )
    fused = {"flash": True, "unfused": False}.get(run.text("attention_kernel"), fused)
    wide = DTYPES[precision] in ("float32", "tfloat32")
    pure = "/PURE" in run.text("notes")
    sizes = Sizes(
        layers=run.count("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=kind.head_dim or hidden // heads,
        ffn=ffn,
        vocab=_padded(run.count("vocab", 50257), degrees.tp),
        rows=degrees.micro * degrees.dp * degrees.cp,
        seq=seq // degrees.cp,
        gated=kind.gated,
        biased=kind.biased,
        rms=kind.rms,
        rotary=kind.rotary,
        causal=kind.causal,
        tied=kind.tied,
        predicted=kind.predicted,
        dropout=0.0 if fused else kind.dropout,
        norm_after=kind.norm_after,
        packed=True,
        fused_attention=fused,
        dtype=DTYPES[precision],
        stored="" if wide or pure else "float32",
        frozen=run.text("task") == "lora",
        experts=experts,
        top_k=top_k,
        expert_ranks=degrees.ep if experts else 1,
        context_ranks=degrees.cp,
    )
    stated = run.number("params_b")
    if stated is not None and not experts:
        # the count of parameters tells a gated feed-forward from a plain one
        other = replace(sizes, gated=not sizes.gated)
        off = [abs(math.log(s.num_parameters / (stated * 1e9))) for s in (sizes, other)]
        if off[0] > 0.1 and off[1] < off[0] / 3:
            return other
    return sizes


def _computed_tokens(seq: int, kind: Architecture, bins: int | None) -> int:
    """Tokens that a sequence of a stated length costs on average: those that are no padding, and
    half a bin.

    Source: Krell et al., "Efficient sequence packing without cross-contamination", 2021: half of
    the tokens of BERT's pretraining sequences of 512 are padding.
    """
    filled = kind.filled.get(seq, 1.0)
    if bins is None or filled == 1.0:
        return seq
    return min(seq, math.ceil(filled * seq + bins / 2.0))


def _experts_of(run: Run, kind: Architecture) -> tuple[int, int]:
    """Experts of a feed-forward and how many a token meets: of the notes, or the architecture."""
    notes = run.text("notes")
    stated = re.search(r"MoE (\d+) (?:routed )?experts,? top-(\d+)", notes)
    if stated is None:
        return kind.experts, kind.top_k
    if "MLA" in notes:
        raise NotExpressedError("the row does not give the ranks of its latent attention")
    if "first" in notes and "dense" in notes:
        raise NotExpressedError("blocks of two kinds: the row does not give the dense ones' width")
    return int(stated[1]), int(stated[2])


def _padded(vocab: int, tp: int) -> int:
    """Classes, made up to a number that divides, as frameworks pad them."""
    unit = 128 * tp if tp > 1 else 1
    return -(-vocab // unit) * unit


def _stated_level(run: Run) -> int | None:
    """The ZeRO level that a row states, or None."""
    text = run.text("fsdp_or_zero").lower()
    for pattern, level in LEVELS.items():
        if re.search(pattern, text):
            return level
    return None


def zero_level(run: Run, traits: Runtime, cluster: Cluster, degrees: Degrees) -> tuple[int, int]:
    """ZeRO level, and ranks that share one copy (0: all); where the row does not say it, the
    optimizer's state is sharded if the framework gathers ahead.
    """
    text = run.text("fsdp_or_zero").lower()
    within = re.search(r"within groups of (\d+)", text)
    size = int(within[1]) if within else 0
    if "hsdp" in text:
        size = min(cluster.devices_per_host, degrees.dp)
    stated = _stated_level(run)
    if stated is None:
        return (1 if traits.hides_gathers else 0), 0
    return stated, size
