"""The processes of a run as torchrun starts them, one per device, and the process groups between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.model.sharding import peers
from castoff.spec.mesh import Group, Mesh, Process
from castoff.spec.scenario import Parallel

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParallel:
    """The parallel sizes of a run: those of `Parallel` that can be run. The devices are the processes of torchrun."""

    tp_size: int = 1
    dp_size: int | None = None
    ep_size: int = 1
    moe_tp_size: int | None = None
    moe_dp_size: int = 1
    o_proj_tp_size: int | None = None
    o_proj_dp_size: int | None = None
    mlp_tp_size: int | None = None
    mlp_dp_size: int | None = None
    lmhead_tp_size: int | None = None
    lmhead_dp_size: int | None = None
    word_embedding_tp: Literal["col", "row"] | None = None
    word_embedding_tp_size: int | None = None
    enable_shared_expert_tp: bool = False

    def over(self, processes: int) -> Parallel:
        """These sizes over so many devices. Raises CastoffError where a size does not divide their number."""
        sizes = asdict(self)
        for name, size in sizes.items():
            if type(size) is int and size > 0 and processes % size:
                raise CastoffError(
                    f"--{name.replace('_', '-')} {size} does not divide the {processes} process(es) of this run; start "
                    f"it with torchrun --nproc-per-node {size} -m castoff run, or a multiple of {size}"
                )
        return Parallel(num_devices=processes, **sizes)


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1


def _variable(name: str, otherwise: str) -> int:
    text = os.environ.get(name, otherwise)
    if not text.isdecimal():
        raise CastoffError(
            f"the variable {name}, which torchrun sets to a number, is {text!r}; unset it or use torchrun"
        )
    return int(text)


_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Meet the other processes of torchrun; alone without torchrun.

    device: "cpu" talks through gloo, "cuda" through NCCL, "npu" through HCCL, each process on the device of its local
    rank. Raises CastoffError where there is no such device, or where torchrun's variables are not all there.
    """
    size = _variable("WORLD_SIZE", "1")
    if size == 1:
        yield World()
        return
    if device != "cpu":
        local, found = _variable("LOCAL_RANK", "0"), torch.accelerator.device_count()
        if local >= found:
            raise CastoffError(
                f"--device {device}: {local + 1} processes or more on a machine with {found} such device(s)"
            )
        torch.accelerator.set_device_index(local)
    try:
        torch.distributed.init_process_group(_BACKENDS[device])
    except ValueError as error:
        raise CastoffError(f"WORLD_SIZE is {size}, and this process was not started by torchrun: {error}") from None
    yield World(torch.distributed.get_rank(), size)
    # Not where a rank fails: the others would complain of the broken connection before it has said why.
    torch.distributed.destroy_process_group()


def for_rank(setup: Setup, world: World) -> Setup:
    """The setup as this rank runs it, with process groups, which all ranks make together.

    Raises CastoffError for what can be cast, and not be run.
    """
    _check(setup)
    if world.size == 1:
        return setup
    groups = _groups(setup.mesh)
    names: dict[tuple[int, int], str] = {}
    for size, stride in sorted({(group.size, group.stride) for group in groups.values() if group.size > 1}):
        for first in range(world.size):
            # The first rank of each group stands for it.
            if first // stride % size:
                continue
            made = torch.distributed.new_group([first + stride * place for place in range(size)])
            if world.rank in torch.distributed.get_process_group_ranks(made):
                names[size, stride] = made.group_name
    process = Process(world.rank, names)
    own: dict[str, Any] = {
        name: replace(group, process=process) for name, group in groups.items() if not name.endswith("_peers")
    }
    return replace(setup, mesh=replace(setup.mesh, **own))


def _groups(mesh: Mesh) -> dict[str, Group]:
    """The groups of a mesh by field, and those between which tokens are regrouped."""
    values = {item.name: getattr(mesh, item.name) for item in fields(mesh)}
    own = {name: group for name, group in values.items() if isinstance(group, Group)}
    regrouped = [mesh.o_proj_tp, mesh.mlp_tp, mesh.lmhead_tp, mesh.embed_tp, mesh.moe_tp]
    return own | {between.name: between for between in (peers(group, mesh.tp) for group in regrouped)}


def _check(setup: Setup) -> None:
    mesh, parallel = setup.mesh, setup.mesh.parallel
    cast_only = {
        f"--pp-size {mesh.pp.size}": mesh.pp.size > 1,
        f"--dcp-size {mesh.dcp.size}": mesh.dcp.size > 1,
        "--enable-redundant-experts": parallel.enable_redundant_experts,
        "--enable-external-shared-experts": parallel.enable_external_shared_experts,
        "--enable-sequence-parallel": setup.sequence_parallel,
        "--enable-matmul-allreduce": "matmul_all_reduce" in setup.fusions,
        "--enable-dispatch-ffn-combine": "dispatch_ffn_combine" in setup.fusions,
    }
    for flag, is_given in cast_only.items():
        if is_given:
            raise CastoffError(f"{flag} can be cast, and cannot be run yet; leave it out")
    if mesh.lmhead_tp.size < mesh.tp.size:
        raise CastoffError(
            f"--lmhead-tp-size {mesh.lmhead_tp.size} leaves no rank of --tp-size {mesh.tp.size} with the logits of all "
            f"tokens, which a run chooses from; give --lmhead-tp-size {mesh.tp.size} or more"
        )
