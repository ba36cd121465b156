# SPDX-License-Identifier: Apache-2.0
"""Small complete plans, written by hand: a Llama over two stages and an MLP on four CPU processes.

Their numbers are made up but consistent (what Plan.verify checks), so tests know every one of them.
"""

from __future__ import annotations

from autoplan.cluster import Cluster
from autoplan.plan import (
    BoundaryTensor,
    BufferPlan,
    ClusterSummary,
    Fingerprint,
    InputTensor,
    MeshLayout,
    ModelSummary,
    ParameterPlan,
    Plan,
    ScheduleSpec,
    Settings,
    Signature,
    StagePlan,
    Strategy,
)
from autoplan.plan_estimates import (
    Alternative,
    Conversion,
    CutRunnerUp,
    Estimate,
    MemoryEstimate,
    OpEstimate,
    ParameterRunnerUp,
    SearchReport,
    StageEstimate,
    Traffic,
)

GIB, MIB = 2**30, 2**20
HIDDEN, INNER, VOCABULARY, SEQ, BATCH = 4096, 14336, 128256, 4096, 64

# name inside a block -> (shape, spec as stored, layout its users see): column split, then row split
LLAMA_BLOCK = {
    "input_layernorm.weight": ((HIDDEN,), "S(0)R", "RR~PP"),
    "mlp.down_proj.weight": ((HIDDEN, INNER), "S(0)S(1)", "RS(1)~PS(1)"),
    "mlp.gate_proj.weight": ((INNER, HIDDEN), "S(0)S(0)", "RS(0)~PS(0)"),
    "mlp.up_proj.weight": ((INNER, HIDDEN), "S(0)S(0)", "RS(0)~PS(0)"),
    "post_attention_layernorm.weight": ((HIDDEN,), "S(0)R", "RR~PP"),
    "self_attn.k_proj.weight": ((1024, HIDDEN), "S(0)S(0)", "RS(0)~PS(0)"),
    "self_attn.o_proj.weight": ((HIDDEN, HIDDEN), "S(0)S(1)", "RS(1)~PS(1)"),
    "self_attn.q_proj.weight": ((HIDDEN, HIDDEN), "S(0)S(0)", "RS(0)~PS(0)"),
    "self_attn.v_proj.weight": ((1024, HIDDEN), "S(0)S(0)", "RS(0)~PS(0)"),
}

# name behind "mlp." -> what would have been next
LLAMA_RUNNERS_UP = {
    "up_proj.weight": ParameterRunnerUp(
        spec="S(1)S(0)",
        used="RS(0)~PS(0)",
        zero=1,
        step_time_s=0.0024,
        compute_s=-0.0006,
        communication_s=0.003,
        peak_memory_bytes=3 * GIB,
    ),
    "down_proj.weight": ParameterRunnerUp(
        spec="RR",
        used="RR~PP",
        zero=0,
        step_time_s=0.0181,
        compute_s=0.0181,
        communication_s=0.0,
        peak_memory_bytes=-GIB,
    ),
}


def llama_plan(num_layers: int = 32) -> Plan:
    """Two stages of dp=2 tp=4 under 1F1B, ZeRO-3, tied embedding and head, on 2 hosts of 8."""
    half = num_layers // 2
    layers = [f"model.layers.{i}" for i in range(num_layers)]
    first = StagePlan(
        index=0,
        ranks=tuple(range(8)),
        layers=("model.embed_tokens", *layers[:half]),
        first_op="embedding",
        last_op=f"add_{2 * half - 1}",
        num_ops=1 + 20 * half,
        recompute=tuple(layers[:half]),
        receives=(),
        estimate=_stage_estimate(0.0042, 0.0101, 0.0018, 61 * GIB),
        traffic=_llama_traffic(last=False),
        runner_up=CutRunnerUp(
            stage_layers=(half, half + 3),
            step_time_s=0.0131,
            peak_memory_bytes=-2 * GIB,
            reason="",
        ),
    )
    last = StagePlan(
        index=1,
        ranks=tuple(range(8, 16)),
        layers=(*layers[half:], "model.norm", "lm_head"),
        first_op=f"rms_norm_{2 * half}",
        last_op="cross_entropy_sum",
        num_ops=4 + 20 * half,
        recompute=(),
        receives=(
            BoundaryTensor(
                name=f"add_{2 * half - 1}",
                from_stage=0,
                shape=(4, SEQ, HIDDEN),
                dtype="bfloat16",
                layout="S(0)R",
                size_bytes=2 * SEQ * HIDDEN * 2,
            ),
        ),
        estimate=_stage_estimate(0.0044, 0.0099, 0.0016, 57 * GIB),
        traffic=_llama_traffic(last=True),
        runner_up=CutRunnerUp(
            stage_layers=(half + 2, half + 1),
            step_time_s=None,
            peak_memory_bytes=None,
            reason="stage 0 needs 78.10 GiB, 73.60 GiB are available",
        ),
    )
    return Plan(
        schema_version=2,
        tool_version="0.1.0",
        torch_version="2.13.0",
        fingerprint=_fingerprint("9a"),
        model=_model("LlamaForCausalLM", 8_030_261_248, 20 * num_layers + 5, 1.3e16, BATCH),
        signature=_llama_signature(),
        settings=Settings(
            mode="train",
            optimizer="adamw",
            precision="bf16-mixed",
            memory_reserve=0.08,
            pins={"tp": 4, "placements": {"model.layers.*.mlp.up_proj.weight": "S(0)S(0)"}},
        ),
        cluster=_cluster("dgx-h100-2x8", 2, 8, "h100-80g", 80 * GIB),
        layout=MeshLayout(dp=2, tp=4, pp=2),
        schedule=ScheduleSpec(name="1f1b", num_microbatches=16),
        stages=(first, last),
        parameters=_llama_parameters(num_layers),
        buffers={
            "model.rotary_emb.inv_freq": BufferPlan(
                shape=(64,), dtype="float32", persistent=False, stages=(0, 1)
            )
        },
        shared=(("lm_head.weight", "model.embed_tokens.weight"),),
        strategies=(
            Strategy(inputs=("S(0)R", "RS(0)~PS(0)"), outputs=("S(0)S(2)",)),
            Strategy(inputs=("S(0)S(2)", "RS(1)~PS(1)"), outputs=("S(0)P~S(0)R",)),
        ),
        op_strategies={f"linear_{i}": i % 2 for i in range(2 * num_layers)},
        op_estimates=tuple(
            OpEstimate(
                name=f"linear_{i}",
                module_path=f"model.layers.0.{module}",
                kind="linear",
                forward_s=0.00011,
                backward_s=0.00023,
                communication_s=0.0,
                saved_bytes=size,
                source=source,
                count=num_layers,
            )
            for i, (module, size, source) in enumerate(
                (("mlp.up_proj", 112 * MIB, "measured"), ("mlp.down_proj", 28 * MIB, "roofline"))
            )
        ),
        conversions=_llama_conversions(num_layers),
        unruled_ops=(),
        estimate=Estimate(
            step_time_s=0.2561,
            compute_s=0.1986,
            communication_s=0.0275,
            bubble_s=0.0189,
            optimizer_s=0.0111,
            peak_memory_bytes=61 * GIB,
            peak_stage=0,
            mfu=0.471,
            expected_error=0.081,
            expected_error_source="h100-80g, 40 measured runs",
            sources={"measured": 0.81, "alpha-beta": 0.13, "roofline": 0.06, "assumed": 0.0},
        ),
        alternatives=_llama_alternatives(),
        search=SearchReport(
            num_candidates=23,
            num_rejected=7,
            gap=0.004,
            optimal=False,
            idle_devices=0,
            idle_reason="",
        ),
    )


def mlp_plan() -> Plan:
    """One stage of dp=1 tp=2 on four CPU processes, inference, one buffer, an op without a rule."""
    specs = {
        "blocks.0.fc1.weight": ((64, 16), "RS(0)", 0),
        "blocks.0.fc2.weight": ((16, 64), "RS(1)", 0),
        "blocks.1.fc1.weight": ((64, 16), "RS(0)", 0),
        "blocks.1.fc2.weight": ((16, 64), "RS(1)", 0),
        "head.bias": ((10,), "RR", 0),
    }
    memory = MemoryEstimate(
        parameters=8232,
        gradients=0,
        optimizer_state=0,
        activations=4096,
        transient=1024,
        reserve=40 * MIB,
    )
    stage = StagePlan(
        index=0,
        ranks=(0, 1),
        layers=("blocks.0", "blocks.1", "head"),
        first_op="linear",
        last_op="cumsum",
        num_ops=8,
        recompute=(),
        receives=(),
        estimate=StageEstimate(
            forward_s=0.00021,
            backward_s=0.0,
            forward_communication_s=0.00009,
            backward_communication_s=0.0,
            recompute_s=0.0,
            send_s=0.0,
            reduction_s=0.0,
            optimizer_s=0.0,
            memory=memory,
        ),
    )
    return Plan(
        schema_version=2,
        tool_version="0.1.0",
        torch_version="2.13.0",
        fingerprint=_fingerprint("3c"),
        model=_model("MLP", 4106, 8, 1.05e6, 8),
        signature=Signature(
            positional=True,
            tensors=(InputTensor(path="0", shape=(8, 16), dtype="float32", batch_dim=0),),
            constants={"scale": 2.0, "causal": True, "mask": None},
        ),
        settings=Settings(
            mode="infer", optimizer="adamw", precision=None, memory_reserve=0.01, pins={}
        ),
        cluster=_cluster("local-cpu-4", 1, 4, "cpu-core", 4 * GIB),
        layout=MeshLayout(dp=1, tp=2, pp=1),
        schedule=ScheduleSpec(name="infer", num_microbatches=1),
        stages=(stage,),
        parameters={
            name: ParameterPlan(
                shape=shape,
                dtype="float32",
                spec=spec,
                used=spec,
                zero=zero,
                trainable=True,
                stages=(0,),
            )
            for name, (shape, spec, zero) in specs.items()
        },
        buffers={},
        shared=(),
        strategies=(Strategy(inputs=("RR", "RS(0)"), outputs=("RS(1)",)),),
        op_strategies={"linear": 0, "linear_2": 0},
        op_estimates=(),
        conversions=tuple(
            Conversion(
                value=f"linear_{2 * i + 1}",
                module_path=f"blocks.{i}.fc2",
                source="RP~RR",
                target="RR",
                forward=("all-reduce tp",),
                backward=(),
                size_bytes=512,
                time_s=0.000045,
                count=1,
            )
            for i in range(2)
        ),
        unruled_ops=("cumsum",),
        estimate=Estimate(
            step_time_s=0.00021,
            compute_s=0.00012,
            communication_s=0.00009,
            bubble_s=0.0,
            optimizer_s=0.0,
            peak_memory_bytes=memory.total,
            peak_stage=0,
            mfu=0.05,
            sources={"assumed": 1.0},
        ),
        alternatives=(),
        search=SearchReport(
            num_candidates=4,
            num_rejected=0,
            gap=0.0,
            optimal=True,
            idle_devices=2,
            idle_reason="on 4 devices the step takes 310 us, on 2 it takes 210 us",
        ),
    )


def _llama_parameters(num_layers: int) -> dict[str, ParameterPlan]:
    half = num_layers // 2
    table = {
        f"model.layers.{i}.{name}": (*entry, (i // half,))
        for i in range(num_layers)
        for name, entry in LLAMA_BLOCK.items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table[name] = ((VOCABULARY, HIDDEN), "S(0)S(0)", "RS(0)~PS(0)", (0, 1))
    table["model.norm.weight"] = ((HIDDEN,), "S(0)R", "RR~PP", (1,))
    return {
        name: ParameterPlan(
            shape=shape,
            dtype="float32",
            spec=spec,
            used=used,
            zero=3,
            trainable=True,
            stages=stages,
            runner_up=LLAMA_RUNNERS_UP.get(name.rpartition("mlp.")[2]),
        )
        for name, (shape, spec, used, stages) in table.items()
    }


def _llama_conversions(num_layers: int) -> tuple[Conversion, ...]:
    sums = [
        Conversion(
            value=f"linear_{i}",
            module_path=f"model.layers.{i}.{module}",
            source="S(0)P~S(0)R",
            target="S(0)R",
            forward=("all-reduce tp",),
            backward=(),
            size_bytes=64 * MIB,
            time_s=0.00025,
            count=1,
        )
        for i in range(num_layers)
        for module in ("self_attn.o_proj", "mlp.down_proj")
    ]
    gather = Conversion(
        value="model.layers.0.mlp.up_proj.weight",
        module_path="model.layers.0.mlp.up_proj",
        source="S(0)S(0)",
        target="RS(0)~PS(0)",
        forward=("all-gather dp",),
        backward=("reduce-scatter dp",),
        size_bytes=28 * MIB,
        time_s=0.00031,
        count=num_layers,
    )
    return (*sums, gather)


def _llama_traffic(*, last: bool) -> tuple[Traffic, ...]:
    boundary = Traffic(axis="pp", purpose="boundary", sent_bytes=4 * GIB, time_s=0.0224)
    return (
        Traffic(axis="dp", purpose="parameters", sent_bytes=3 * GIB, time_s=0.0042),
        *(() if last else (boundary,)),
        Traffic(axis="tp", purpose="activations", sent_bytes=36 * GIB, time_s=0.0275),
    )


def _llama_alternatives() -> tuple[Alternative, ...]:
    slower = Alternative(
        dp=4,
        tp=2,
        pp=2,
        zero=3,
        schedule="1f1b",
        num_microbatches=16,
        recompute=True,
        step_time_s=0.2744,
        peak_memory_bytes=66 * GIB,
        reason="7.1% slower: gradients cross hosts",
        compute_s=0.2101,
        communication_s=0.0342,
        bubble_s=0.019,
        optimizer_s=0.0111,
    )
    refused = Alternative(
        dp=16,
        tp=1,
        pp=1,
        zero=0,
        schedule="gpipe",
        num_microbatches=4,
        recompute=False,
        step_time_s=None,
        peak_memory_bytes=135 * GIB,
        reason="needs 135.0 GiB on each of 16 devices, h100-80g has 73.6 GiB for a plan",
    )
    return (slower, refused)


def _llama_signature() -> Signature:
    ids = {"shape": (BATCH, SEQ), "dtype": "int64", "batch_dim": 0}
    return Signature(
        positional=False,
        tensors=(InputTensor(path="input_ids", **ids), InputTensor(path="labels", **ids)),
        constants={"use_cache": False},
    )


def _stage_estimate(
    forward_s: float, backward_s: float, communication_s: float, total_bytes: int
) -> StageEstimate:
    states = 12 * GIB
    return StageEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        forward_communication_s=communication_s / 2,
        backward_communication_s=communication_s / 2,
        recompute_s=0.0,
        send_s=0.0007,
        reduction_s=0.0042,
        optimizer_s=0.0069,
        memory=MemoryEstimate(
            parameters=states // 2,
            gradients=states // 2,
            optimizer_state=states,
            activations=total_bytes - 2 * states - 3 * GIB,
            transient=3 * GIB,
            reserve=6 * GIB,
        ),
    )


def _fingerprint(start: str) -> Fingerprint:
    return Fingerprint(
        graph=start + "01",
        inputs=start + "02",
        cluster=start + "03",
        profiles=start + "04",
        settings=start + "05",
    )


def _model(
    name: str, num_parameters: int, num_ops: int, flop_per_step: float, batch_size: int
) -> ModelSummary:
    return ModelSummary(
        name=name,
        num_parameters=num_parameters,
        num_trainable_parameters=num_parameters,
        num_ops=num_ops,
        flop_per_step=flop_per_step,
        batch_size=batch_size,
    )


def _cluster(
    name: str, num_hosts: int, devices_per_host: int, device: str, memory_bytes: int
) -> ClusterSummary:
    return ClusterSummary(
        name=name,
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        device=device,
        memory_bytes=memory_bytes,
        num_devices=num_hosts * devices_per_host,
        description=Cluster.load(name).to_json(),
    )
