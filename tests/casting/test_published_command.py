"""The published command: GLM-5.2, a 4096-token chunk behind 61,000 tokens, on 16 dies."""

import json

import pytest
from inline_snapshot import snapshot

from castoff import Prediction, cast
from castoff.casting.summary import OpSummary, op_summaries
from tests.casting.strategies import scenario
from tests.generators import ASCEND, GLM_52

pytestmark = pytest.mark.golden


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    step = scenario(
        num_devices=16,
        tp_size=16,
        dp_size=1,
        ep_size=16,
        context_length=61_000,
        query_length=4096,
        num_queries=1,
        num_mtp_tokens=3,
        compile=True,
        quantize_linear_action="W4A8_STATIC",
    )
    return cast(GLM_52, ASCEND, step)


def test_calls(prediction: Prediction) -> None:
    # 78 layers and 3 drafts; 75 + 3 sparse MLPs, 3 dense ones; 21 full layers and 3 drafts.
    assert {op.name: op.calls for op in sorted(op_summaries(prediction), key=lambda op: op.name)} == snapshot(
        {
            "add": 78,
            "add_rms_norm": 4,
            "add_rms_norm2": 158,
            "all_gather": 82,
            "all_reduce": 84,
            "all_to_all": 156,
            "concat": 3,
            "dsa_indexer": 24,
            "embedding": 4,
            "grouped_matmul_quant": 78,
            "grouped_matmul_quant_swiglu": 78,
            "linear": 7,
            "linear_quant": 243,
            "mlapo_quant": 81,
            "moe_gate": 78,
            "moe_permute": 78,
            "moe_unpermute": 78,
            "multihead_latent_attention": 81,
            "quantize": 321,
            "rms_norm": 10,
            "sample": 4,
            "select_rows": 4,
            "swiglu": 81,
        }
    )


def test_bytes(prediction: Prediction) -> None:
    # Whole bytes: experts touched are an expectation.
    assert {
        op.name: round(op.bytes) for op in sorted(op_summaries(prediction), key=lambda op: op.name) if op.bytes
    } == snapshot(
        {
            "add": 717299712,
            "add_rms_norm": 302333952,
            "add_rms_norm2": 31409283072,
            "concat": 201719808,
            "dsa_indexer": 2757765888,
            "embedding": 201523200,
            "grouped_matmul_quant": 9935826335,
            "grouped_matmul_quant_swiglu": 16643928768,
            "linear": 1080192640,
            "linear_quant": 6892750848,
            "mlapo_quant": 7532309760,
            "moe_gate": 731078784,
            "moe_permute": 2153224320,
            "moe_unpermute": 2153144448,
            "multihead_latent_attention": 767574245376,
            "quantize": 4596056064,
            "rms_norm": 403365888,
            "sample": 1239040,
            "select_rows": 98304,
            "swiglu": 295723008,
        }
    )


def test_shapes(prediction: Prediction) -> None:
    # The main pass with the first draft, then two drafts over their window of four tokens.
    names = ("mlapo_quant", "dsa_indexer", "multihead_latent_attention")
    assert {op.name: by_shape(op) for op in op_summaries(prediction) if op.name in names} == snapshot(
        {
            "multihead_latent_attention": {
                "4096x4x256 65096x1152 4096x2048 1x509 1 1792x512": 79,
                "4x4x256 65096x1152 4x2048 1x509 1 1792x512": 2,
            },
            "dsa_indexer": {
                "4096x6144 4096x2048 4096x64 4096x64 65096x256 4096 1x509 1 "
                "4096x2048 128x6144 32x6144 128 128 4096x1 128x1": 22,
                "4x6144 4x2048 4x64 4x64 65096x256 4 1x509 1 4096x2048 128x6144 32x6144 128 128 4096x1 128x1": 2,
            },
            "mlapo_quant": {
                "4096x6144 4096x64 4096x64 4096 65096x1152 "
                "2048x6144 2048 1024x2048 576x6144 512 2048x1 1024x1 576x1": 79,
                "4x6144 4x64 4x64 4 65096x1152 2048x6144 2048 1024x2048 576x6144 512 2048x1 1024x1 576x1": 2,
            },
        }
    )


def by_shape(op: OpSummary) -> dict[str, int]:
    """Input shapes as `4096x6144 512`, and calls."""
    return {
        " ".join("x".join(map(str, shape)) for shape in json.loads(f"[{text}]")): calls
        for text, calls in op.shapes.items()
    }


def test_indexer_buckets(prediction: Prediction) -> None:
    indexer = next(op for op in op_summaries(prediction) if op.name == "dsa_indexer")
    assert {name: (bucket.flops, bucket.bytes) for name, bucket in indexer.buckets.items()} == snapshot(
        {
            "q_proj": (1511962705920.0, 470188032.0),
            "k_proj": (141746503680.0, 1116844032.0),
            "k_norm": (69212160.0, 12288.0),
            "k_rope": (17303040.0, 0.0),
            "key_cache_write": (0.0, 23070720.0),
            "head_weights_proj": (35436625920.0, 9437184.0),
            "rope": (553697280.0, 0.0),
            "score": (46546511462400.0, 0.0),
            "relu": (181822310400.0, 0.0),
            "head_reduce": (363644620800.0, 0.0),
            "topk": (22727788800.0, 738263040.0),
            "key_cache_read": (0.0, 399950592.0),
        }
    )


def test_footprint(prediction: Prediction) -> None:
    memory = prediction.footprint
    assert {name: getattr(memory, name) for name in type(memory).__dataclass_fields__} == snapshot(
        {
            "device_bytes_capacity": 68719476736,
            "weights_bytes": 28339843840.0,
            "kv_bytes": 5924256768.0,
            "indexer_cache_bytes": 366620672.0,
            "pool_bytes": 0,
            "selection_bytes": 0,
            "metadata_bytes": 134236152,
            "activation_bytes": 234881024,
            "communication_bytes": 838860800,
            "reserved_bytes": 0.0,
            "host_kv_bytes": 0,
            "staging_bytes": 0,
            # Of 1 TiB that 16 dies share.
            "host_bytes_capacity": 68719476736.0,
        }
    )
    assert prediction.fits
