"""Everything structural that the forward pass needs, checked and resolved once per structure."""

from __future__ import annotations

from dataclasses import dataclass

from castoff.errors import CastoffError
from castoff.spec.backend import Backend
from castoff.spec.device import Device
from castoff.spec.mesh import Mesh, resolve_mesh
from castoff.spec.model import ModelSpec
from castoff.spec.quant import CacheFormat, LinearFormat, cache_format, linear_format
from castoff.spec.scenario import Compilation, Mode, Mtp, Quant, Scenario, check_types

MAX_MTP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One structure: model, groups, number formats, speculation, fusions.

    fusions: those that the backend has and the compilation options allow. unquantized: linear layers that the
    backend keeps in bf16. stage_starts: first layer of every pipeline stage. expert_load_alpha: exponent of the power
    law of the experts' loads; 0 where tokens choose all alike.
    """

    model: ModelSpec
    mesh: Mesh
    mode: Mode
    linear: LinearFormat
    expert: LinearFormat
    lm_head: LinearFormat | None
    cache: CacheFormat
    unquantized: frozenset[str]
    mtp: Mtp
    mtp_window: str
    fusions: frozenset[str]
    multistream: bool
    sequence_parallel: bool
    quantized_dispatch: bool
    stage_starts: tuple[int, ...]
    expert_load_alpha: float = 0.0

    @property
    def topk_limit(self) -> int | None:
        """Rows that a query attends to; None for dense attention."""
        return self.model.indexer.index_topk if self.model.indexer else None

    @property
    def shares_topk_among_drafts(self) -> bool:
        """Whether later draft calls of a decode step reuse the first one's top-k."""
        return self.mode == "decode" and self.model.indexer is not None and self.model.indexer.share_for_mtp_iteration


def resolve_setup(model: ModelSpec, device: Device, backend: Backend, scenario: Scenario, mode: Mode) -> Setup:
    """Check the structure of a scenario against model, device and backend.

    Raises CastoffError with the reason where the structure cannot run.
    """
    check_types(scenario)
    if scenario.parallel.num_devices > device.max_devices:
        given = scenario.parallel.num_devices
        raise CastoffError(f"--num-devices {given}: {device.name} connects at most {device.max_devices}")
    mesh = resolve_mesh(model, scenario.parallel)
    _check_mtp(model, scenario.mtp)
    quant = scenario.quant
    if quant.mxfp4_group_size < 1:
        raise CastoffError(f"--mxfp4-group-size must be at least 1, got {quant.mxfp4_group_size}")
    expert = linear_format(quant.quantize_linear_action, mxfp4_group_size=quant.mxfp4_group_size)
    linear = linear_format(
        quant.quantize_non_expert_linear_action or quant.quantize_linear_action,
        mxfp4_group_size=quant.mxfp4_group_size,
    )
    _check_rates(device, quant, (expert, linear))
    compilation = scenario.compilation
    return Setup(
        model=model,
        mesh=mesh,
        mode=mode,
        linear=linear,
        expert=expert,
        lm_head=linear if quant.quantize_lmhead else None,
        cache=cache_format(model, quant.quantize_attention_action, quant.quantize_indexer_action),
        unquantized=frozenset(backend.unquantized),
        mtp=scenario.mtp,
        mtp_window=backend.mtp_window,
        fusions=_fusions(backend, compilation),
        multistream=compilation.multistream,
        sequence_parallel=compilation.enable_sequence_parallel and mesh.tp.size > 1,
        quantized_dispatch=backend.quantized_dispatch,
        stage_starts=stage_starts(model, mesh.pp.size),
        expert_load_alpha=0.0 if backend.serving is None else backend.serving.expert_load_alpha,
    )


def stage_starts(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """First layer of each pipeline stage: the group starts nearest to equal cuts, so that no top-k crosses a cut."""
    if stages == 1:
        return (0,)
    starts = [group.owner for group in model.index_groups] or list(range(model.num_hidden_layers))
    chosen = [0]
    for stage in range(1, stages):
        ideal = stage * model.num_hidden_layers / stages
        # Leave a start for each stage that is still to come.
        left = [start for start in starts if start > chosen[-1]]
        candidates = left[: len(left) - (stages - 1 - stage)]
        chosen.append(min(candidates, key=lambda start: abs(start - ideal)))
    return tuple(chosen)


def _fusions(backend: Backend, compilation: Compilation) -> frozenset[str]:
    asked = {
        "add_rms_norm": compilation.compile,
        "norm_quant": compilation.compile,
        "grouped_matmul_swiglu": compilation.compile,
        "matmul_all_reduce": compilation.enable_matmul_allreduce,
        "dispatch_ffn_combine": compilation.enable_dispatch_ffn_combine,
    }
    for flag, fusion in (
        ("--enable-matmul-allreduce", "matmul_all_reduce"),
        ("--enable-dispatch-ffn-combine", "dispatch_ffn_combine"),
    ):
        if asked[fusion] and fusion not in backend.fusions:
            raise CastoffError(
                f"{flag}: the backend {backend.name} has no {fusion} kernel; it has {sorted(backend.fusions)}"
            )
    return frozenset(fusion for fusion, wanted in asked.items() if wanted) & backend.fusions


def _check_mtp(model: ModelSpec, mtp: Mtp) -> None:
    tokens, accepted = mtp.num_mtp_tokens, mtp.mtp_acceptance_length
    if not 0 <= tokens <= MAX_MTP_TOKENS:
        raise CastoffError(f"--num-mtp-tokens must be from 0 to {MAX_MTP_TOKENS}, got {tokens}")
    if tokens and model.num_nextn_predict_layers == 0:
        raise CastoffError(f"--num-mtp-tokens {tokens}: {model.name} has no MTP block (num_nextn_predict_layers is 0)")
    if accepted is not None and not 1 <= accepted <= 1 + tokens:
        raise CastoffError(
            f"--mtp-acceptance-length counts the certain token too, so it is from 1 to 1 + --num-mtp-tokens = "
            f"{1 + tokens}; got {accepted:g}"
        )


def _check_rates(device: Device, quant: Quant, formats: tuple[LinearFormat, ...]) -> None:
    for dtype, use in (("bf16", "attention"), ("fp32", "the router")):
        if not device.supports(dtype):
            raise CastoffError(f"{device.name} gives no matrix rate for {dtype}, in which {use} computes")
    flags = ("--quantize-linear-action", "--quantize-non-expert-linear-action")
    for flag, form in zip(flags, formats, strict=True):
        if not device.supports(form.activation_dtype):
            raise CastoffError(
                f"{flag} {form.action} multiplies in {form.activation_dtype}, which {device.name} "
                f"cannot; it has {sorted(device.matrix_flops_per_s)}"
            )
    attention, keys = quant.quantize_attention_action, quant.quantize_indexer_action
    flag, scored = ("attention", attention) if keys is None else ("indexer", keys)
    if scored != "DISABLED" and not device.supports(scored.lower()):
        raise CastoffError(
            f"--quantize-{flag}-action {scored} scores in {scored.lower()}, which {device.name} cannot; "
            f"it has {sorted(device.matrix_flops_per_s)}"
        )
