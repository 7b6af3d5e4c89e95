"""What each process of the test of several ranks does; torchrun starts it. `ranks.py FILE` writes FILE on rank 0."""

import json
import sys
from pathlib import Path

import torch

from castoff.errors import CastoffError
from castoff.runtime.distributed import RunParallel, for_rank, joined
from castoff.spec.offload import Offload
from tests.offload.runs import (
    KINDS,
    MODES,
    POOL,
    Case,
    KeepingEngine,
    KeepingLockstepEngine,
    assert_equal,
    options_of,
    outcome,
    setup_of,
)

LAYOUTS = {"tp 2": RunParallel(tp_size=2, ep_size=2), "dp 2, ep 2": RunParallel(ep_size=2)}
# Of unequal lengths, so that one attention-DP rank waits for the other, and goes on after it.
PROMPTS = (POOL + 1, 3 * POOL, 5)


def main() -> None:
    """Every mode in every layout against all rows on the device, in the same layout; what differs is written down."""
    torch.set_num_threads(1)
    found: list[str] = []
    with joined("cpu") as world:
        for name, parallel in LAYOUTS.items():
            kind = KeepingEngine if "tp" in name else KeepingLockstepEngine
            for model in KINDS[:2]:
                for drafts in (0, 2):
                    case = Case(kind=model, drafts=drafts, prompts=PROMPTS, slots=2, new_tokens=6)
                    setup = for_rank(setup_of(case, parallel.over(world.size)), world)
                    resident = outcome(case, kind=kind, setup=setup)
                    for mode in MODES:
                        options: Offload = options_of(mode, **({"mtp_gather_reuse": False} if mode == "gather" else {}))
                        try:
                            assert_equal(outcome(case, options, kind=kind, setup=setup), resident)
                        except (AssertionError, CastoffError) as error:
                            found.append(f"{name}, {model}, {drafts} drafts, {mode}: {error}")
        everywhere: list[list[str]] = [[]] * world.size
        torch.distributed.all_gather_object(everywhere, found)
        if world.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(everywhere))


if __name__ == "__main__":
    main()
