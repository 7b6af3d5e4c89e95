"""Make the hit profile of GLM-5.2 that castoff ships, out of drawn traces.

    python examples/hit_profile/make.py FILE.json      a quarter of an hour on two cores

No trace of the model is published, but hit rates are. Every model of selections that meets them is drawn and replayed,
at one to four query tokens a step: counts are those of the default model, and the spread is that over all models.
docs/synthetic_traces.md has the models.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import astuple, replace
from pathlib import Path

from castoff.lab.fit import ALTERNATIVES
from castoff.lab.profile import hit_profile
from castoff.lab.replay import Replay, replay
from castoff.spec.hit_profile import HitCurve, HitPoint, HitProfile
from castoff.spec.model import load_model
from castoff.trace.synthetic import Decoding, SelectionModel, generate_trace

MODEL = "zai-org/GLM-5.2"
# The first layers have eleven index groups, whose noise has the mean and the variance of all 21's.
LAYERS = 38
CONTEXT, STEPS, FILLING = 65_536, 500, 250
POOLS = (2048, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768)
REPLAY = Replay(policies=("fifo", "lru", "clock", "serve_install", "gather"), pools=POOLS, skip_steps=FILLING)
SOURCE = (
    "drawn selections with the hit rates that are published for GLM-5.2 at 64K (CANN recipes, "
    "hicann/cann-recipes-infer); spread over five models that have them (examples/hit_profile/make.py)"
)


def profile_of(selection: SelectionModel, drafts: int) -> HitProfile:
    """The profile of one model of selections."""
    spec = load_model(MODEL, num_hidden_layers=LAYERS)
    decoding = Decoding(context_length=CONTEXT, steps=STEPS, num_mtp_tokens=drafts)
    with tempfile.TemporaryDirectory() as folder:
        trace = generate_trace(Path(folder) / "drawn.topk", spec, selection, decoding)
        return hit_profile(replay(trace, spec, REPLAY), spec, trace)


def over_models(profiles: list[HitProfile]) -> tuple[HitCurve, ...]:
    """The first profile's curves, spread over all."""
    curves = []
    for same in zip(*(profile.curves for profile in profiles), strict=True):
        points = []
        for alike in zip(*(curve.points for curve in same), strict=True):
            misses = [point.unique_misses for point in alike]
            points.append(rounded(replace(alike[0], unique_misses_low=min(misses), unique_misses_high=max(misses))))
        curves.append(replace(same[0], points=tuple(points)))
    return tuple(curves)


def rounded(point: HitPoint) -> HitPoint:
    """Counts to a hundredth of a row; hits take up what that changes."""
    pool_tokens, _, *others = (round(float(count), 2) for count in astuple(point))
    made = HitPoint(int(pool_tokens), 0.0, *others)
    return replace(made, hits=round(float(point.rows - made.rows), 2))


def main(target: Path) -> None:
    """Draw, replay and write."""
    models = {"default": SelectionModel(), **ALTERNATIVES}
    curves: list[HitCurve] = []
    for drafts in range(4):
        profiles = []
        for name, selection in models.items():
            print(f"{1 + drafts} query tokens, {name}", file=sys.stderr)
            profiles.append(profile_of(selection, drafts))
        curves += over_models(profiles)
    made = HitProfile(
        model=MODEL,
        owner_layers=tuple(group.owner for group in load_model(MODEL).index_groups),
        index_topk=profiles[0].index_topk,
        context_length=CONTEXT,
        origin="assumed",
        source=SOURCE,
        curves=tuple(curves),
    )
    lines = json.dumps(made.as_json(), indent=1)
    target.write_text(lines.replace("\n    ", " ").replace("\n   }", " }") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
