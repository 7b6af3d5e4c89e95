"""Bytes that one cached token costs, per layer and in all."""

from dataclasses import replace
from typing import cast

import pytest

from castoff.casting.footprint import Footprint, footprint
from castoff.model.record import record_step
from castoff.ops.lengths import Lengths
from castoff.spec.backend import load_backend
from castoff.spec.quant import AttentionAction, cache_format
from castoff.spec.scenario import Mtp, Parallel, Quant, Scenario, Workload
from tests.generators import (
    ATTENTION_ACTIONS,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    GLM_52,
    MODELS,
    NVIDIA,
    device,
    model,
    setup_of,
    uniform,
)

pytestmark = pytest.mark.golden

LATENT_ROW = {"DISABLED": 1152, "FP8": 656, "INT8": 656}
INDEXER_ROW = {"DISABLED": 256, "FP8": 132, "INT8": 130}
TOKENS = 1000


def caches(
    name: str,
    action: AttentionAction,
    *,
    drafts: int = 0,
    parallel: Parallel | None = None,
    lengths: Lengths | None = None,
) -> Footprint:
    """Footprint of a decode step after which `TOKENS` tokens are cached."""
    scenario = Scenario(
        workload=Workload(decode=True),
        quant=Quant(quantize_attention_action=action),
        mtp=Mtp(num_mtp_tokens=drafts),
        parallel=parallel or Parallel(),
    )
    where = device(NVIDIA)
    setup = setup_of(model(name), scenario, on=NVIDIA)
    lengths = lengths or uniform(1, TOKENS - 1 - drafts, 1 + drafts)
    backend = load_backend(where.default_backend)
    return footprint(setup, where, backend, record_step(setup, lengths), lengths, reserved_bytes=0)


def per_token(own: Footprint) -> tuple[float, float]:
    """(latent, indexer) bytes of a token."""
    return cast(float, own.kv_bytes) / TOKENS, cast(float, own.indexer_cache_bytes) / TOKENS


@pytest.mark.parametrize("action", ATTENTION_ACTIONS)
@pytest.mark.parametrize("name", [GLM_5, GLM_52, DEEPSEEK_V32])
def test_rows(name: str, action: AttentionAction) -> None:
    """512 latent and 64 rope values: bf16; or one byte each, a scale per 128 and the rope part in bf16."""
    rows = cache_format(model(name), action)
    assert rows.latent_row_bytes == LATENT_ROW[action]
    assert rows.index_row_bytes == INDEXER_ROW[action]


def test_rows_by_their_parts() -> None:
    assert 2 * (512 + 64) == 1152
    assert 512 + 4 * 4 + 2 * 64 == 656
    fp8, int8 = (cache_format(model(), action) for action in ("FP8", "INT8"))
    assert (fp8.index_key_bytes, fp8.index_scale_bytes) == (128, 4)
    assert (int8.index_key_bytes, int8.index_scale_bytes) == (128, 2)


@pytest.mark.parametrize(
    ("action", "latent", "indexer"),
    [
        # 78 rows of 1152 B; 21 keys of 256 B
        ("DISABLED", 89_856, 5_376),
        # 78 · 656; 21 · 132
        ("FP8", 51_168, 2_772),
        ("INT8", 51_168, 2_730),
    ],
)
def test_glm_52(action: AttentionAction, latent: int, indexer: int) -> None:
    assert per_token(caches(GLM_52, action)) == (latent, indexer)


def test_glm_52_in_fp8_keeps_no_keys_on_shared_layers() -> None:
    latent, indexer = per_token(caches(GLM_52, "FP8"))
    assert latent + indexer == 53_940
    # What an indexer cache on every layer would take.
    assert 78 * (656 + 132) == 61_464 != latent + indexer
    assert sum(per_token(caches(GLM_5, "FP8"))) == 61_464


@pytest.mark.parametrize(
    ("name", "layers", "full"), [(GLM_5, 78, 78), (GLM_52, 78, 21), (DEEPSEEK_V32, 61, 61), (DEEPSEEK_V3, 61, 0)]
)
@pytest.mark.parametrize("action", ATTENTION_ACTIONS)
def test_all_models(name: str, layers: int, full: int, action: AttentionAction) -> None:
    assert per_token(caches(name, action)) == (layers * LATENT_ROW[action], full * INDEXER_ROW[action])


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_mtp_block_has_one_cache_whatever_the_drafts(name: str, drafts: int) -> None:
    plain, drafting = per_token(caches(name, "FP8")), per_token(caches(name, "FP8", drafts=drafts))
    assert drafting[0] - plain[0] == 656
    assert drafting[1] - plain[1] == (0 if name == DEEPSEEK_V3 else 132)


@pytest.mark.parametrize("tp", [1, 4, 16])
def test_tensor_parallel_ranks_each_hold_the_cache(tp: int) -> None:
    parallel = Parallel(num_devices=16, tp_size=tp, ep_size=16)
    assert per_token(caches(GLM_52, "FP8", parallel=parallel)) == (51_168, 2_772)


@pytest.mark.parametrize("dcp", [2, 8])
def test_dcp_splits_both_caches_by_token(dcp: int) -> None:
    parallel = Parallel(num_devices=16, tp_size=16, ep_size=16, dcp_size=dcp)
    assert per_token(caches(GLM_52, "FP8", parallel=parallel)) == (51_168 / dcp, 2_772 / dcp)


def test_the_fullest_pipeline_stage() -> None:
    """Four stages start at 0, 18, 38 and 58; the two in the middle have 20 layers of 5 groups each."""
    own = caches(GLM_52, "FP8", parallel=Parallel(num_devices=4, pp_size=4))
    assert per_token(own) in [(20 * 656, 5 * 132), (20 * 656, 4 * 132)]


def test_requests_add_up() -> None:
    ragged = Lengths((*uniform(3, 99, 1).classes, *uniform(1, 699, 1).classes))
    assert caches(GLM_52, "FP8", lengths=ragged) == replace(
        caches(GLM_52, "FP8", lengths=ragged), kv_bytes=51_168 * 1000, indexer_cache_bytes=2_772 * 1000
    )
