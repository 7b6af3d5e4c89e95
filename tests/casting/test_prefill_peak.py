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
V32 = load_model("deepseek-ai/DeepSeek-V3.2")


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


def v32(requests: int, context: int) -> Scenario:
    """DeepSeek-V3.2 as CANN's benchmark runs it, prefill under CP 128."""
    return Scenario(
        workload=Workload(num_queries=requests, context_length=context, decode=True),
        parallel=Parallel(
            num_devices=128, dp_size=128, ep_size=128, o_proj_tp_size=4, mlp_tp_size=4, lmhead_tp_size=16,
            word_embedding_tp="row", word_embedding_tp_size=16,
        ),
        quant=Quant(quantize_attention_action="INT8"),
        mtp=Mtp(num_mtp_tokens=3),
        compilation=Compilation(compile=True),
        backend="cann-ge",
        prefill_tokens=context // 128,
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

    def test_two_requests_of_64k_fit_a_die_and_four_do_not(self) -> None:
        """With 3 GiB reserved, which DeepSeek-V3.2's failure at 384K asks for."""
        batches = [replace(glm(batch, prefill_tokens=2048), reserved_memory_gb=3.0) for batch in (64, 128)]
        assert [cast(GLM, DIE, batch).fits for batch in batches] == [True, False]

    @pytest.mark.parametrize(
        ("requests", "context", "gigabytes"),
        [
            (128, 65_536, 25.3), (256, 65_536, 28.6), (512, 65_536, 35.2), (1024, 65_536, 48.3),
            (128, 131_072, 33.0), (128, 262_144, 48.5),
        ],
    )  # fmt: skip
    def test_deepseek_v32(self, requests: int, context: int, gigabytes: float) -> None:
        """The plots seem to be of the framework's own memory, without communication buffers."""
        memory = footprint(v32(requests, context), V32)
        own = float(memory.used_bytes) - memory.communication_bytes
        assert own / 1e9 == pytest.approx(gigabytes, rel=0.03)

    @pytest.mark.parametrize(("requests", "context"), [(2048, 65_536), (128, 393_216)])
    def test_deepseek_v32_does_not_fit(self, requests: int, context: int) -> None:
        assert not cast(V32, DIE, replace(v32(requests, context), reserved_memory_gb=3.0)).fits
