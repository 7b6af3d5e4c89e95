"""The prefill that a decode step's device has to hold too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from castoff.casting.footprint import Footprint
from castoff.casting.prediction import cast
from castoff.casting.sweep import sweep
from castoff.errors import CastoffError
from castoff.spec.device import load_device
from castoff.spec.model import load_model
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload

GIB = 2**30
DIE = load_device("ATLAS_800_A3_752T_128G_DIE")
GLM = load_model("zai-org/GLM-5.2")


def glm(requests: int, context: int = 65_536, prefill_tokens: int | None = None) -> Scenario:
    """GLM-5.2 as CANN's offload evaluation runs it, without offload."""
    return Scenario(
        workload=Workload(num_queries=requests, context_length=context, decode=True),
        parallel=Parallel(
            num_devices=32, dp_size=32, ep_size=32, lmhead_tp_size=32,
            word_embedding_tp="row", word_embedding_tp_size=32,
        ),
        quant=Quant(quantize_indexer_action="INT8"),
        mtp=Mtp(num_mtp_tokens=3),
        compilation=Compilation(compile=True),
        backend="cann-ge",
        prefill_tokens=prefill_tokens,
    )  # fmt: skip


def footprint(scenario: Scenario, model: object = GLM) -> Footprint:
    return cast(model, DIE, scenario).footprint  # type: ignore[arg-type]


class TestPeak:
    def test_it_is_that_of_a_prefill(self) -> None:
        own = footprint(replace(glm(32, prefill_tokens=4096), backend="ascend"))
        workload = Workload(num_queries=32, query_length=4096)
        prefill = footprint(replace(glm(32), backend="ascend", workload=workload))
        assert own.activation_bytes == prefill.activation_bytes > 1e9

    def test_a_small_one_changes_nothing(self) -> None:
        step = replace(glm(3200), backend="ascend")
        assert footprint(replace(step, prefill_tokens=1)) == footprint(step)

    def test_more_tokens_never_need_less(self) -> None:
        peaks = [footprint(glm(64, prefill_tokens=tokens)).activation_bytes for tokens in (1, 64, 2048, 65_536)]
        assert peaks == sorted(peaks)

    def test_it_is_nothing_but_memory(self) -> None:
        plain, own = cast(GLM, DIE, glm(64)), cast(GLM, DIE, glm(64, prefill_tokens=65_536))
        assert plain.latency_s == own.latency_s
        assert plain.fits
        assert not own.fits

    def test_it_is_swept(self) -> None:
        lengths = np.array([16_384, 65_536])
        swept = sweep(GLM, DIE, glm(64), {"prefill_tokens": [None, 2048], "context_length": lengths})
        for row, tokens in enumerate((None, 2048)):
            for column, context in enumerate(lengths.tolist()):
                own = footprint(glm(64, context, prefill_tokens=tokens))
                assert swept.device_bytes[row, column] == pytest.approx(float(own.used_bytes), rel=1e-12)

    @pytest.mark.parametrize("tokens", [0, -4])
    def test_too_few_tokens(self, tokens: int) -> None:
        with pytest.raises(CastoffError, match="--prefill-tokens must be at least 1"):
            cast(GLM, DIE, glm(64, prefill_tokens=tokens))

    def test_a_prefill_has_its_own(self) -> None:
        prefill = replace(glm(64, prefill_tokens=64), workload=Workload(num_queries=32, query_length=64))
        with pytest.raises(CastoffError, match="--prefill-tokens is for decode steps"):
            cast(GLM, DIE, prefill)


class TestPublished:
    @pytest.mark.golden
    def test_glm_52(self) -> None:
        memory = footprint(glm(64, prefill_tokens=2048))
        assert memory.weights_bytes / GIB == pytest.approx(40.03, abs=0.01)
        assert float(memory.kv_bytes + memory.indexer_cache_bytes) / 2 / GIB == pytest.approx(5.73, abs=0.005)
