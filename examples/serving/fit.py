"""Fit what a stack's host takes, on measured points under load, and say how well it predicts points left out.

    python examples/serving/fit.py --points glm5_sglang.csv --prompt-point long_prompt.csv [--write sglang.toml]

Two constants a system (host seconds a decode step and a prefill) are fitted by least squares on the logarithms of TPOT
and TTFT, and one factor of prefill on points with a long prompt. Files have the columns of `castoff accuracy e2e`.
Steps are cast once a point, so after a change of the backend's curves this is run again in about a minute, and with
--fit-only, which leaves no points out, in seconds.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from castoff.accuracy.deployments import load_deployment
from castoff.accuracy.points import LoadPoint, read_points
from castoff.serving.instance import Instance
from castoff.serving.result import Served
from castoff.serving.serve import Prepared, prepare
from castoff.serving.workload import ClosedLoop, Requests
from castoff.spec.serving import DEFAULT_SYSTEM

# Relative scatter of measured means: repeated points differ by about so much.
TPOT_SCATTER, TTFT_SCATTER = 0.02, 0.1
# Above this mean time in the queue a point says how much memory there is, and little about the host.
QUEUEING_S = 2.0
START_S = (6e-3, 0.15)
SMALLEST_STEP_S = 2e-3

Hosts = Mapping[str, tuple[float, float]]
"""By system: host seconds of a decode step, and of a prefill."""


@dataclass(frozen=True, slots=True)
class Case:
    """A point with the tables of its deployment."""

    point: LoadPoint
    requests: Requests
    prepared: Prepared


@dataclass(frozen=True, slots=True)
class Found:
    """A prediction of a point."""

    ttft_s: float
    tpot_s: float
    queue_s: float


def read_cases(paths: Sequence[Path]) -> list[Case]:
    """Points of all files, cast."""
    cases = []
    for path in paths:
        for point in read_points(path):
            assert isinstance(point, LoadPoint), f"{path} holds points under load"
            deployed = load_deployment(point, None)
            load = ClosedLoop(concurrency=point.concurrency, prompt_tokens=point.isl, output_tokens=point.osl)
            requests = load.drawn()
            cases.append(Case(point, requests, prepare(deployed.model, deployed.device, deployed.scenario, requests)))
    return cases


def predict(case: Case, host: tuple[float, float], factor: float) -> Found:
    """A point with other constants than the file's."""
    steps = case.prepared.steps
    system = replace(steps.system, host_s_per_decode_step=host[0], host_s_per_prefill=host[1])
    own = replace(steps, system=system, serving=replace(steps.serving, prefill_factor=factor))
    rules = replace(case.prepared.rules, delay_s=own.delay_s)
    served: Served = Instance(case.requests, own, rules).run()
    return Found(float(served.ttft_s.mean()), float(np.nanmean(served.tpot_s)), float(served.queued_s.mean()))


def residuals(cases: Sequence[Case], host: tuple[float, float], factor: float) -> np.ndarray:
    """Logarithms of measured over predicted, in units of their scatter."""
    left = []
    for case in cases:
        found = predict(case, host, factor)
        left.append(np.log(case.point.tpot_s / found.tpot_s) / TPOT_SCATTER)
        if case.point.ttft_s < QUEUEING_S:
            left.append(np.log(case.point.ttft_s / found.ttft_s) / TTFT_SCATTER)
    return np.array(left)


def fit_host(cases: Sequence[Case], factor: float, start: tuple[float, float]) -> tuple[float, float]:
    """The two constants of one system: along the slopes of its start, then by trying steps to either side.

    Which prompts share a pass changes by jumps, so slopes alone stop short.
    """
    host = np.array(start)
    here = residuals(cases, start, factor)
    slopes = np.empty((len(here), 2))
    for column in range(2):
        step = 0.1 * START_S[column]
        more = host + step * np.eye(2)[column]
        slopes[:, column] = (here - residuals(cases, (float(more[0]), float(more[1])), factor)) / step
    host = np.maximum(host + np.linalg.lstsq(slopes, here, rcond=None)[0], 0.0)

    def cost(tried: np.ndarray) -> float:
        return float((residuals(cases, (float(tried[0]), float(tried[1])), factor) ** 2).sum())

    best, steps = cost(host), 0.08 * np.array(START_S)
    while steps[1] > SMALLEST_STEP_S:
        tries = [np.maximum(host + sign * steps * np.eye(2)[column], 0.0) for column in range(2) for sign in (1, -1)]
        costs = [cost(tried) for tried in tries]
        if min(costs) < best:
            best, host = min(costs), tries[int(np.argmin(costs))]
        else:
            steps = steps / 2
    return float(host[0]), float(host[1])


def fit_hosts(cases: Sequence[Case], factor: float, start: Hosts) -> dict[str, tuple[float, float]]:
    """Constants of every system that has points."""
    systems = dict.fromkeys(case.point.system for case in cases)
    return {
        name: fit_host([case for case in cases if case.point.system == name], factor, start.get(name, START_S))
        for name in systems
    }


def fit_factor(prompts: Sequence[Case]) -> float:
    """TTFT of long prompts over the passes that compute them, as if there were no host.

    It takes all of the host for the device's, which on a long prompt is little: an upper bound. Short prompts say
    nothing of it, since the host's floor is longer than their passes.
    """
    ratios = [case.point.ttft_s / case.prepared.steps.prefill.pass_s([(case.point.isl, 0)]) for case in prompts]
    return float(np.mean(ratios))


def host_of(hosts: Hosts, case: Case) -> tuple[float, float]:
    """Constants of a point's system; of one that has none, the mean of the others, for prefill as slow as its host is
    to launch layers, which tables of ops say."""
    if case.point.system in hosts:
        return hosts[case.point.system]
    steps = case.prepared.steps
    own_s = steps.system.prefill_floor_s_per_layer
    scaled = [
        (decode_s, prefill_s * own_s / steps.serving.system(name).prefill_floor_s_per_layer)
        for name, (decode_s, prefill_s) in hosts.items()
    ]
    mean = np.mean(scaled, axis=0)
    return float(mean[0]), float(mean[1])


def scores(title: str, cases: Sequence[Case], hosts: Hosts, factor: float, *, rows: bool = False) -> None:
    """Mean errors, and those of every point."""
    tpot, ttft = [], []
    for case in cases:
        found = predict(case, host_of(hosts, case), factor)
        tpot.append(found.tpot_s / case.point.tpot_s - 1)
        ttft.append(found.ttft_s / case.point.ttft_s - 1)
        if rows:
            point = case.point
            print(
                f"  {point.system:9} {point.isl:6,} {point.osl:6,} {point.concurrency:4} requests   "
                f"TTFT {found.ttft_s * 1e3:8.0f} of {point.ttft_s * 1e3:8.0f} ms {ttft[-1]:+6.1%}   "
                f"TPOT {found.tpot_s * 1e3:6.2f} of {point.tpot_s * 1e3:6.2f} ms {tpot[-1]:+6.1%}   "
                f"queue {found.queue_s:.2f} s"
            )
    print(f"{title}: mean |error| of TPOT {np.abs(tpot).mean():.1%}, of TTFT {np.abs(ttft).mean():.1%}")


def left_out(
    points: Sequence[Case], key: Callable[[LoadPoint], object], title: str, hosts: Hosts, factor: float
) -> None:
    """Predict each group of points with constants of the others. hosts: of all points, where the fits start."""
    for group in dict.fromkeys(key(case.point) for case in points):
        others = [case for case in points if key(case.point) != group]
        if others:
            found = fit_hosts(others, factor, hosts)
            own = [case for case in points if key(case.point) == group]
            scores(f"{title} {group} left out", own, found, factor)


def write(path: Path, hosts: Hosts, factor: float) -> None:
    """Put the constants into a backend file, where it has the sections."""
    text = path.read_text(encoding="utf-8")
    figures = {("serving", "prefill_factor"): round(factor, 3)}
    mean = np.mean(list(hosts.values()), axis=0)
    for system, (decode_s, prefill_s) in {**hosts, DEFAULT_SYSTEM: (float(mean[0]), float(mean[1]))}.items():
        section = f"serving.systems.{system}"
        figures[section, "host_s_per_decode_step"] = round(decode_s, 5)
        figures[section, "host_s_per_prefill"] = round(prefill_s, 4)
    for (section, key), value in figures.items():
        pattern = rf"(^\[{re.escape(section)}\]\n(?:(?!\[\w).*\n)*?{key} = )[^\s#]+"
        text, count = re.subn(pattern, rf"\g<1>{value!r}", text, flags=re.MULTILINE)
        assert count == 1, f"[{section}] has one {key}"
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Fit, leave out, and write."""
    parser = argparse.ArgumentParser(description="Fit what a stack's host takes on points under load.")
    parser.add_argument("--points", type=Path, nargs="+", required=True, help="CSV files of points under load")
    parser.add_argument("--prompt-point", type=Path, nargs="*", default=[], help="CSV files with long prompts")
    parser.add_argument("--write", type=Path, help="a backend file whose [serving] gets the constants")
    parser.add_argument("--fit-only", action="store_true", help="leave no points out")
    given = parser.parse_args()
    points, prompts = read_cases(given.points), read_cases(given.prompt_point)
    factor = fit_factor(prompts) if prompts else 1.0
    hosts = fit_hosts(points, factor, {})
    for system, (decode_s, prefill_s) in hosts.items():
        print(f"{system}: host {decode_s * 1e3:.2f} ms a decode step, {prefill_s * 1e3:.0f} ms a prefill")
    print(f"factor of prefill: {factor:.3f}")
    scores("all points", points, hosts, factor, rows=True)
    if prompts:
        scores("long prompts", prompts, hosts, factor, rows=True)
    if given.write:
        write(given.write, hosts, factor)
    if given.fit_only:
        return
    left_out(points, lambda point: point.system, "system", hosts, factor)
    left_out(points, lambda point: (point.isl, point.osl), "lengths", hosts, factor)
    left_out(points, lambda point: (point.system, point.isl, point.osl), "series", hosts, factor)


if __name__ == "__main__":
    main()
