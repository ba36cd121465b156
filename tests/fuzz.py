# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz`: random legal plans over the seven models on real processes, each against
one device.

    python -m tests.fuzz [--plans 200] [--seed 0] [--models mlp,gpt2] [--world 2]

Prints one line a plan and a summary; exits 1 when a plan differs by more than 1e-9 relative, naming
it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))

from models import BUILDERS
from parity import capture_named, compare
from pool import RemoteError, run
from random_plans import random_plan

TOLERANCE = 1e-9
LAYOUTS = {
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    4: [(2, 2, 1), (4, 1, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)],
}


def main() -> int:
    """Runs the plans; 0 when all are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(BUILDERS))
    parser.add_argument("--world", type=int, default=0, help="2 or 4; default both")
    parser.add_argument("--layout", default="", help="dp,tp,pp; default all")
    options = parser.parse_args()
    names = options.models.split(",")
    captured = {name: capture_named(name)[2] for name in names}
    rng = random.Random(options.seed)
    start, equal, failed, worst, refused = time.perf_counter(), 0, [], 0.0, 0
    number = 0
    while equal + len(failed) < options.plans:
        number += 1
        name = names[number % len(names)]
        world = options.world or rng.choice((2, 4))
        dp, tp, pp = rng.choice(LAYOUTS[world])
        if options.layout:
            dp, tp, pp = map(int, options.layout.split(","))
            world = dp * tp * pp
        microbatches, schedule = rng.choice((1, 2, 4)), rng.choice(("gpipe", "1f1b"))
        schedule = (
            "gpipe" if microbatches < pp else schedule
        )  # 1F1B has no schedule for fewer microbatches than stages
        seed, recompute = rng.randrange(1 << 30), rng.random() < 0.3
        label = f"{name} seed={seed} dp={dp} tp={tp} pp={pp} m={microbatches} {schedule}"
        label += " recompute" if recompute else ""
        try:
            plan = random_plan(
                captured[name],
                seed,
                dp=dp,
                tp=tp,
                pp=pp,
                num_microbatches=microbatches,
                schedule=schedule,
                recompute=recompute,
            )
        except ValueError as error:
            refused += 1
            if refused > 50 * options.plans:
                raise RuntimeError(f"no plan is legal: {error}") from error
            continue
        try:
            # type: ignore[attr-defined]
            errors = [e.worst for e in run(world, compare, plan.to_json(), name, 1)]
        except (RemoteError, TimeoutError) as error:
            failed.append(label)
            print(f"FAILED {label}\n{error}", flush=True)
            continue
        worst = max(worst, *errors)
        if max(errors) > TOLERANCE:
            failed.append(label)
            print(f"DIFFERS {max(errors):.2e} {label}", flush=True)
        else:
            equal += 1
            print(f"equal   {max(errors):.2e} {label}", flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{equal} equal, {len(failed)} not, {refused} draws that the model refuses; "
        f"largest relative error {worst:.2e}; {seconds:.0f} s"
    )
    for label in failed:
        print(f"  {label}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
