# SPDX-License-Identifier: Apache-2.0
"""A plan whose names are attacks on a page: markup, quotes, ends of scripts, very long words."""

from __future__ import annotations

from msgspec.structs import replace
from sample_plans import mlp_plan

from autoplan.plan import Plan

# names of modules; each would set `window.hacked` or break the page if it were taken as code
HOSTILE = (
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked=2</script>",
    '"><svg onload="window.hacked=3">',
    "'-(window.hacked=4)-'",
    "`${window.hacked=5}`",
    "<!--<script>",
    "%%DATA%%",
    "]]>&lt;b&gt;&amp;",
    "javascript:window.hacked=6",
    "__proto__",
    "constructor",
    "line\u2028separator\u2029\n\x00\x1b[31m",
    "\u202egnihtemos\u202c \U0001f4a5",
    "long" * 200,
)


def hostile_plan() -> Plan:
    """The MLP on four processes with hostile names wherever a plan has a name."""
    base = mlp_plan()
    worst = "".join(HOSTILE[:3])
    parameter = base.parameters["head.bias"]
    conversion = base.conversions[0]
    return replace(
        base,
        model=replace(base.model, name=worst),
        cluster=replace(base.cluster, name=worst, device=HOSTILE[0]),
        stages=(replace(base.stages[0], layers=HOSTILE, recompute=HOSTILE[:1]),),
        parameters={f"{name}.weight": parameter for name in HOSTILE},
        conversions=tuple(
            replace(conversion, value=name, module_path=name, forward=(name,)) for name in HOSTILE
        ),
        unruled_ops=(worst,),
        search=replace(base.search, idle_reason=worst),
    )
