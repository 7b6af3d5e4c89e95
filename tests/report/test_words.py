"""A prediction in sentences."""

from castoff.api import cast
from castoff.report.step import step_report
from castoff.report.words import misfit, verdict, what_is_cast
from castoff.spec.scenario import Mtp, Parallel, Quant, Scenario, Workload
from tests.cli.commands import DEVICE, MODEL

TP16 = Parallel(num_devices=16, tp_size=16, ep_size=16)


def test_what_is_cast() -> None:
    scenario = Scenario(
        workload=Workload(num_queries=3, context_length=(10, 10, 2000)),
        parallel=Parallel(num_devices=16, tp_size=4, ep_size=16, mlp_tp_size=8),
        quant=Quant(quantize_non_expert_linear_action="DISABLED", quantize_attention_action="INT8"),
        mtp=Mtp(num_mtp_tokens=1),
    )
    assert what_is_cast(cast(MODEL, DEVICE, scenario)) == [
        f"{MODEL}, decode: 1 request of 2 new tokens after 2,000 cached; 2 requests of 2 new tokens after 10 cached",
        f"16 x {DEVICE}, backend ascend: TP 4, DP 4, EP 16, MLP TP 8",
        "experts W8A8_DYNAMIC, other linear layers DISABLED, KV cache INT8, "
        "1 MTP token (1.74 gained per decode step, assumed), not compiled",
    ]


def test_many_lengths_are_a_range() -> None:
    scenario = Scenario(workload=Workload(num_queries=5, context_length=(1, 2, 3, 4, 50000)), parallel=TP16)
    assert what_is_cast(cast(MODEL, DEVICE, scenario))[0] == (
        f"{MODEL}, decode: 5 requests of 1 new token after 1 to 50,000 cached"
    )


def test_a_step_that_fits() -> None:
    prediction = cast(MODEL, DEVICE, Scenario(parallel=TP16))
    assert misfit(prediction) is None
    last = verdict(step_report(prediction))
    assert last.startswith(f"Bound by {prediction.bound}: ")
    assert "it fits, with " in last
    assert "of 64.00 GiB free on a device." in last


def test_a_step_that_does_not_fit() -> None:
    scenario = Scenario(
        workload=Workload(num_queries=64, context_length=65536),
        parallel=Parallel(num_devices=16, tp_size=8, ep_size=16),
    )
    prediction = cast(MODEL, DEVICE, scenario)
    first = misfit(prediction)
    assert first is not None
    assert first.startswith("DOES NOT FIT: ")
    batch = prediction.largest.max_batch_per_device
    assert f"{batch} request{'s' if batch > 1 else ''} per attention-DP rank ({2 * batch} in all)" in first
    assert "it does not fit: " in verdict(step_report(prediction))


def test_notes_come_once_and_before_the_predictions_own() -> None:
    scenario = Scenario(workload=Workload(context_length=2_000_000), parallel=TP16)
    report = step_report(cast(MODEL, DEVICE, scenario), notes=["first", "first"])
    assert report.notes[0] == "first"
    assert len(report.notes) == 2


def test_bounds_share_out_all_op_time() -> None:
    report = step_report(cast(MODEL, DEVICE, Scenario(parallel=TP16)))
    assert sum(report.bound_s.values()) > 0
    assert abs(sum(report.bound_s.values()) - report.op_s) < 1e-12


def test_fits_share_the_op_time() -> None:
    scenario = Scenario(
        workload=Workload(num_queries=16, context_length=8192, decode=True),
        parallel=Parallel(num_devices=8, tp_size=8),
        quant=Quant(quantize_linear_action="FP8", quantize_indexer_action="FP8"),
    )
    said = verdict(step_report(cast("zai-org/GLM-5.2-FP8", "h200_sxm", scenario)))
    assert "% calibrated, " in said
    assert said.endswith("% assumed.")
