"""Recorded programs, and what tests ask of them."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from castoff.model.record import record_step
from castoff.ops.lengths import Lengths
from castoff.ops.program import BlockCall, OpCall, Program
from castoff.spec.model import ModelSpec
from castoff.spec.scenario import (
    Mode,
    Scenario,
)
from tests.generators import (
    ASCEND,
    setup_of,
    uniform,
)

MODES: tuple[Mode, ...] = ("decode", "prefill")


ATTENTION = ("multihead_latent_attention", "multihead_latent_attention_quant")


def program_of(
    spec: ModelSpec, scenario: Scenario | None = None, *, mode: Mode = "decode", on: str = ASCEND, repeat: bool = True,
    lengths: Lengths | None = None,
) -> Program:  # fmt: skip
    """One step of 8 requests, each with 4000 tokens in the cache."""
    scenario = scenario or Scenario()
    query = 1 + scenario.mtp.num_mtp_tokens if mode == "decode" else 512
    setup = setup_of(spec, scenario, on=on, mode=mode)
    return record_step(setup, lengths or uniform(8, 4000, query), repeat=repeat)


def names(program: Program) -> Counter[str]:
    return Counter(call.op.name for _, call in program.calls())


def layer_entries(program: Program) -> list[BlockCall]:
    """The blocks of the main stack's layers, in order."""
    return [entry for entry in program.schedule if entry.label.startswith("layer ")]


def draft_entries(program: Program) -> list[BlockCall]:
    return [entry for entry in program.schedule if entry.label.startswith("mtp ")]


def tokens_of(entry: BlockCall) -> Any:
    (call,) = (call for call in entry.block.calls if call.op.name in ATTENTION)
    return call.tensor(0).shape[0]


def check_work(call: OpCall) -> None:
    """Nothing of an op's work is negative or not a number, and no collective has a group of one."""
    work = call.op.work(call)
    for part in work.parts:
        amounts = (part.matrix_flops, part.vector_flops, part.bytes, part.gather_bytes, part.gather_rows)
        assert all(np.all(np.isfinite(a)) and np.all(np.asarray(a) >= 0) for a in amounts), (call.op.name, part)
    for collective in work.collectives:
        assert collective.group.size > 1, (call.op.name, collective)
        assert np.all(np.asarray(collective.bytes) > 0)


def works_of(program: Program) -> Iterator[tuple[Any, ...]]:
    """FLOPs, bytes and message of every recorded call."""
    for block in program.blocks:
        for call in block.calls:
            work = call.op.work(call)
            yield work.flops, work.bytes, sum(collective.bytes for collective in work.collectives)
