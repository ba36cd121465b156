# SPDX-License-Identifier: Apache-2.0
"""What runs a plan: how a training framework fuses, overlaps, launches and keeps, as data.

In comes the name of a file of `profiles/runtimes/`; out goes a `Runtime`, immutable. The planner
prices for autoplan's own executor; `check` prices a published run for the framework that made it.
What a trait is worth in seconds is said in `costs/` and `solver/`.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import msgspec

from autoplan.cluster_format import profiles_dir
from autoplan.errors import ProfileError
from autoplan.units import US

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]


class Trait(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Where traits of a runtime come from."""

    source: Literal["published", "fitted", "assumed", "measured", "given"]
    document: str = ""
    note: str = ""


class Variant(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What a release or an option of a framework does otherwise.

    Attributes:
        when: Pattern of the sources and notes of runs that used it.
        traits: Fields of `Runtime` that it changes.
    """

    when: str
    traits: dict[str, Any]


class Runtime(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, dict=True):
    """One framework's traits. The defaults are autoplan's own executor.

    Attributes:
        name: "megatron-2021".
        matches: Patterns of the sources (and notes) of published runs that it made; earlier files,
            by `rank`, win.
        rank: Order among runtimes whose patterns match.
        fuses: Groups of ops ("gelu") that run inside their neighbours' kernels where these are of
            the same group.
        most_zero: The highest ZeRO level it has.
        norm_passes: Times that a norm moves the bytes of one kernel: more where it is written out.
        softmax_passes: The same for the softmax of unfused attention: more where scale and mask are
            kernels of their own.
        selective: What its selective recomputation runs again: "core" (attention between its
            projections), "operators" (all but attention and every second product) or "blocks"
            (every second one).
        attention: Fused attention kernels, names of a device's `kernel.flash`: it calls the first
            that the device has.
        packs_qkv: Queries, keys and values come from one product.
        fused_attention: Where a run does not say it, attention is one kernel.
        network: Share of the bandwidth between hosts that its collectives reach of what the
            hardware's best do.
        counts_masked: Its stated FLOP/s count attention's products in full, masked or not.
        sequence_parallel: It can split activations between tensor parallel regions by tokens.
        host_us: Host time to launch one kernel: a layer takes no less than its launches.
        send_us: Host time around the transfers of one pass of a stage, which waits for them.
        step_us: Host time once per step, behind which nothing runs.
        owner_us: Time for one rank's shard of what the optimizer updated, where the owners send
            theirs to all others one after the other.
        hides_gradients: Gradients are reduced while backward goes on.
        hides_gathers: Sharded parameters are gathered ahead of their use.
        hides_tp: Share of the tensor parallel communication that runs behind products.
        gathers_again: Activations gathered over tensor parallel ranks are kept as their parts.
        contention: Of the shorter of two that run at once, the share by which both delay the end.
        gradient_dtype: In which gradients are summed and reduced; "" as they are stored.
        products: Share of the rate of the device's best products that its libraries reach.
        bundles: Parameters of a layer are gathered, and gradients reduced, in one collective.
        float8_casts: Passes over each operand of a product to make its float8 copy.
        reserve_GiB: Device memory outside the plan: context, libraries, communication buffers.
        fragmentation: Share of activations and transients that the allocator adds.
        vocabulary_parallel: Embedding and loss are split by classes over tensor parallel ranks.
        even_stages: Stages get equal numbers of blocks, whatever the ends cost; what is left over
            goes to the stages in the "middle" or the "last" ones. "": as planned.
        pads_shards: What is sharded over data parallel ranks is filled up where it does not divide;
            else it stays whole.
        compiled: Backward is compiled with forward: of what recomputation could spare, only what
            backward reads is kept.
        loss_bytes: Bytes per logit that live at the peak of the loss, and where ranks split the
            classes; (): as PyTorch's kernels keep them.
        bins: Tokens by which sequences are sorted into bins, and a microbatch filled up to the end
            of its bin; 0: what is missing is left out; None: filled up to the stated length.
        step_bytes: Bytes per parameter that the optimizer's step holds beside gradients and states.
        variants: Releases and options; all that match count, later ones win.
        provenance: Of the traits.
    """

    name: str
    matches: tuple[str, ...] = ()
    rank: int = 0
    fuses: tuple[tuple[str, ...], ...] = ()
    most_zero: int = 3
    norm_passes: Number = 1.0
    softmax_passes: Number = 1.0
    selective: Literal["core", "operators", "blocks"] = "core"
    attention: tuple[str, ...] = ("flash2",)
    packs_qkv: bool = True
    fused_attention: bool = True
    network: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    counts_masked: bool = False
    sequence_parallel: bool = True
    host_us: Number = 0.0
    send_us: Number = 0.0
    step_us: Number = 0.0
    owner_us: Number = 0.0
    hides_gradients: bool = False
    hides_gathers: bool = False
    hides_tp: Share = 0.0
    gathers_again: bool = False
    contention: Share = 0.0
    gradient_dtype: str = ""
    products: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    bundles: bool = False
    float8_casts: Number = 1.0
    reserve_GiB: Number = 0.0
    fragmentation: Share = 0.0
    vocabulary_parallel: bool = True
    even_stages: Literal["", "middle", "last"] = ""
    pads_shards: bool = False
    compiled: bool = False
    loss_bytes: tuple[Number, ...] = ()
    bins: Annotated[int, msgspec.Meta(ge=0)] | None = None
    step_bytes: Number = 0.0
    variants: tuple[Variant, ...] = ()
    provenance: dict[str, Trait] = {}

    @cached_property
    def fused(self) -> dict[str, int]:
        """Op -> its group of `fuses`."""
        return {op: i for i, group in enumerate(self.fuses) for op in group}

    @property
    def host_s(self) -> float:
        """Seconds to launch one kernel."""
        return self.host_us * US

    def hidden_s(self, compute_s: float, communication_s: float, *, hides: bool) -> float:
        """Seconds that communication adds to computation.

            max(0, communication - compute) + contention * min(communication, compute)

        all of it where it is not hidden.

        Source: Liu et al., "Galvatron-BMW", TKDE 2024: both are slowed while they overlap.
        """
        if not hides:
            return communication_s
        both = min(compute_s, communication_s)
        return communication_s - both + self.contention * both


OWN = Runtime(name="autoplan")


@lru_cache(maxsize=1)
def runtimes() -> tuple[Runtime, ...]:
    """The shipped runtimes, by rank.

    Raises:
        ProfileError: A file does not fit the schema.
    """
    found = []
    for path in sorted((profiles_dir() / "runtimes").glob("*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Runtime))
        except msgspec.DecodeError as problem:
            raise ProfileError(f"{path}: {problem}. Correct the file.") from problem
    return tuple(sorted(found, key=lambda r: (r.rank, r.name)))


def runtime(name: str) -> Runtime:
    """The shipped runtime of a name.

    Raises:
        ProfileError: There is none; the known ones are listed.
    """
    for known in runtimes():
        if known.name == name:
            return known
    names = ", ".join(r.name for r in runtimes())
    raise ProfileError(f"unknown runtime {name!r}: known are {names}. Name one of them.")


def runtime_of(text: str, zero: int = 0) -> Runtime | None:
    """The first shipped runtime one of whose patterns is found in `text` and that has this ZeRO
    level.
    """
    for known in runtimes():
        if known.most_zero >= zero and any(_found(pattern, text) for pattern in known.matches):
            return _as_used(known.name, tuple(_found(v.when, text) for v in known.variants))
    return None


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


@lru_cache(maxsize=256)
def _as_used(name: str, which: tuple[bool, ...]) -> Runtime:
    """A shipped runtime with the variants that were used."""
    known = runtime(name)
    changed: dict[str, Any] = {}
    for variant, used in zip(known.variants, which):
        changed |= variant.traits if used else {}
    if not changed:
        return known
    try:
        return msgspec.convert({**msgspec.to_builtins(known), **changed}, Runtime)
    except msgspec.ValidationError as problem:
        raise ProfileError(
            f"variants of runtime {name!r}: {problem}. Correct the file."
        ) from problem
