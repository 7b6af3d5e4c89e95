"""The kernels that ops name for fits: their sizes, and that they do no part twice."""

import pytest

from castoff.ops import collectives, linear, moe
from castoff.ops.expert_load import ExpertLayer
from castoff.ops.linear import Weight
from castoff.ops.program import OpCall, Recorder
from castoff.ops.work import Kernel
from castoff.spec.mesh import Group
from castoff.spec.quant import linear_format

FP8 = linear_format("FP8")


def recorded(body: object) -> list[OpCall]:
    recorder = Recorder()
    recorder.block("x", "x", lambda: (body(recorder), ())[1])  # type: ignore[operator]
    calls = [call for _, call in recorder.program.calls()]
    for call in calls:
        done = [name for kernel in call.work.kernels for name in kernel.parts]
        assert len(done) == len(set(done))
        assert set(done) <= {part.name for part in call.work.parts}
    return calls


def fp8_weight(recorder: Recorder, *shape: int) -> Weight:
    scales = recorder.tensor(*shape[:-2], *FP8.weight_scales(*shape[-2:]), dtype="fp32", kind="weight")
    return Weight(recorder.tensor(*shape, dtype="fp8", kind="weight"), scales, FP8)


def test_an_fp8_linear_is_a_quantisation_and_a_product() -> None:
    quantize, product = recorded(lambda r: linear.linear(r.tensor(64, 512), fp8_weight(r, 1024, 512)))
    (first,), (second,) = quantize.work.kernels, product.work.kernels
    assert (first.curve, first.sizes) == ("quantize_fp8_block", {"bytes": 64 * 512 * 3 + 64 * 4 * 4})
    assert (second.curve, second.sizes) == ("matmul_fp8_block", {"m": 64, "n": 1024, "k": 512})


def grouped(layer: ExpertLayer | None) -> Kernel:
    def body(recorder: Recorder) -> None:
        weight = fp8_weight(recorder, 32, 256, 512)
        counts = recorder.tensor(32, dtype="int32")
        moe.grouped_matmul(linear.quantize(recorder.tensor(100, 512), weight), weight, counts, 20.0, layer)

    return recorded(body)[-1].work.kernels[0]


def test_grouped_products_are_asked_for_by_their_layer() -> None:
    kernel = grouped(ExpertLayer(512, 256, 1.2))
    assert (kernel.curve, kernel.general) == ("grouped_fp8_block_256x512", "grouped_fp8_block")
    assert kernel.sizes == {"rows": 100, "touched": 20.0, "n": 256, "k": 512, "skew": 2.2}
    assert kernel.known_curve({"grouped_fp8_block"}) == "grouped_fp8_block"
    assert kernel.known_curve({"grouped_fp8_block", "grouped_fp8_block_256x512"}) == "grouped_fp8_block_256x512"
    assert kernel.known_curve({"matmul_bf16"}) is None
    assert (grouped(None).curve, grouped(None).sizes["skew"]) == ("grouped_fp8_block", 1.0)


def test_small_kernels_of_experts() -> None:
    def body(recorder: Recorder) -> None:
        rows, order, _ = moe.moe_permute(recorder.tensor(10, 512), recorder.tensor(10, 8, dtype="int32"), 32)
        moe.moe_unpermute(rows, recorder.tensor(10, 8, dtype="fp32"), order)
        moe.swiglu(recorder.tensor(10, 512))

    kernels = [kernel for call in recorded(body) for kernel in call.work.kernels]
    assert [kernel.curve for kernel in kernels] == ["permute", "weighted_sum", "swiglu"]
    assert kernels[2].sizes == {"bytes": 10 * 768 * 2}


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_collectives(name: str) -> None:
    (call,) = recorded(lambda r: getattr(collectives, name)(r.tensor(16, 512), Group("tp", 4)))
    (kernel,) = call.work.kernels
    assert (kernel.curve, kernel.parts) == (name, ())
    assert kernel.sizes == {"bytes": 16 * 512 * 2 * (4 if name == "all_gather" else 1), "ranks": 4.0}


def test_exchanges_with_experts_say_their_way_and_phase() -> None:
    exchange = collectives.ExpertExchange("dispatch", "decode", 256, 8)

    def body(recorder: Recorder) -> None:
        rows_RD = recorder.tensor(64 * 8, 6144, dtype="fp8")
        collectives.all_to_all(rows_RD, Group("ep", 8), shape=(700, 6144), exchange=exchange)

    ((kernel,),) = (call.work.kernels for call in recorded(body))
    assert (kernel.curve, kernel.general) == ("dispatch_decode", "all_to_all")
    # The busiest rank receives more than it sends.
    assert kernel.sizes == {
        "bytes": 700 * 6144, "ranks": 8.0, "experts": 256, "experts_per_token": 8, "row_bytes": 6144,
    }  # fmt: skip
