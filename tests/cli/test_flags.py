"""From arguments to a scenario."""

from dataclasses import fields
from typing import Any

import pytest

from castoff import api
from castoff.errors import CastoffError
from castoff.flags import COMPILATION_NAMES, WorkloadFlags, flag_help, normalize, with_compilation_config
from castoff.spec.scenario import Compilation, Mtp, Parallel, Quant, Scenario, Workload
from tests.cli.commands import CAST, exit_status

Capture = pytest.CaptureFixture[str]


class CaughtError(Exception):
    """Carries what `cast` was called with."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.scenario = scenario


@pytest.fixture
def scenario_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def catch(model: object, device: object, scenario: Scenario, **_: object) -> None:
        raise CaughtError(scenario)

    monkeypatch.setattr(api, "cast", catch)

    def scenario_of(*arguments: str) -> Scenario:
        with pytest.raises(CaughtError) as caught:
            exit_status(*CAST, *arguments)
        return caught.value.scenario

    return scenario_of


def test_no_flags_is_the_default_scenario(scenario_of: Any) -> None:
    assert scenario_of() == Scenario()


def test_every_flag_of_the_scenario(scenario_of: Any) -> None:
    scenario = scenario_of(
        *("--num-queries", "8", "--query-length", "512", "--context-length", "1000", "--decode"),
        *("--prefix-cache-hit-rate", "0.5", "--num-devices", "64", "--tp-size", "4", "--dp-size", "8"),
        *("--pp-size", "2", "--dcp-size", "2", "--ep-size", "16", "--moe-tp-size", "2", "--moe-dp-size", "1"),
        *("--o-proj-tp-size", "2", "--o-proj-dp-size", "16", "--mlp-tp-size", "8", "--mlp-dp-size", "4"),
        *("--lmhead-tp-size", "16", "--lmhead-dp-size", "2", "--word-embedding-tp", "row"),
        *("--word-embedding-tp-size", "8", "--enable-redundant-experts", "--enable-shared-expert-tp"),
        *("--enable-external-shared-experts", "--host-external-shared-experts", "--expert-load-imbalance", "1.5"),
        *("--quantize-linear-action", "W4A8_STATIC", "--quantize-non-expert-linear-action", "W8A8_STATIC"),
        *("--quantize-lmhead", "--mxfp4-group-size", "16", "--quantize-attention-action", "INT8"),
        *("--quantize-indexer-action", "FP8"),
        *("--num-mtp-tokens", "3", "--mtp-acceptance-length", "2.5", "--compile", "--no-enable-multistream"),
        *("--enable-sequence-parallel", "--enable-matmul-allreduce", "--enable-dispatch-ffn-combine"),
        *("--backend", "nvidia", "--reserved-memory-gb", "4", "--prefill-tokens", "64", "--disable-repetition"),
    )
    assert scenario == Scenario(
        workload=Workload(num_queries=8, query_length=512, context_length=1000, decode=True, prefix_cache_hit_rate=0.5),
        parallel=Parallel(
            num_devices=64,
            tp_size=4,
            dp_size=8,
            pp_size=2,
            dcp_size=2,
            ep_size=16,
            moe_tp_size=2,
            moe_dp_size=1,
            o_proj_tp_size=2,
            o_proj_dp_size=16,
            mlp_tp_size=8,
            mlp_dp_size=4,
            lmhead_tp_size=16,
            lmhead_dp_size=2,
            word_embedding_tp="row",
            word_embedding_tp_size=8,
            enable_redundant_experts=True,
            enable_shared_expert_tp=True,
            enable_external_shared_experts=True,
            host_external_shared_experts=True,
            expert_load_imbalance=1.5,
        ),
        quant=Quant(
            quantize_linear_action="W4A8_STATIC",
            quantize_non_expert_linear_action="W8A8_STATIC",
            quantize_lmhead=True,
            mxfp4_group_size=16,
            quantize_attention_action="INT8",
            quantize_indexer_action="FP8",
        ),
        mtp=Mtp(num_mtp_tokens=3, mtp_acceptance_length=2.5),
        compilation=Compilation(
            compile=True,
            enable_multistream=False,
            enable_sequence_parallel=True,
            enable_matmul_allreduce=True,
            enable_dispatch_ffn_combine=True,
        ),
        backend="nvidia",
        reserved_memory_gb=4,
        prefill_tokens=64,
        disable_repetition=True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--compilation-config", "enable_multistream,enable_sequence_parallel"],
        ["--compilation-config", "enable_multistream enable_sequence_parallel"],
        ["--compilation-config", "enable_multistream", "enable_sequence_parallel"],
        ["--compilation-config=enable_multistream, enable-sequence-parallel"],
        ["--compilation-config", '{"enable_multistream": true, "enable_sequence_parallel": true}'],
        ["--compilation-config", "enable_multistream", "--enable-sequence-parallel"],
        ["--enable-multistream", "--enable-sequence-parallel"],
    ],
)
def test_spellings_of_compiler_options(scenario_of: Any, arguments: list[str]) -> None:
    expected = Compilation(compile=True, enable_multistream=True, enable_sequence_parallel=True)
    assert scenario_of("--compile", *arguments).compilation == expected


def test_compilation_config_before_the_model(scenario_of: Any) -> None:
    assert normalize(["cast", "--compilation-config", "enable_multistream", "glm52"]) == [
        *("cast", "--compilation-config=enable_multistream", "glm52")
    ]


def test_no_multistream_needs_no_compiler(scenario_of: Any) -> None:
    assert scenario_of("--no-enable-multistream").compilation.enable_multistream is False


def test_compiler_options_that_contradict() -> None:
    off = Compilation(compile=True, enable_multistream=False)
    assert with_compilation_config(off, '{"enable_multistream": false}') == off
    with pytest.raises(CastoffError, match="contradict"):
        with_compilation_config(off, "enable_multistream")


@pytest.mark.parametrize(
    ("arguments", "normal"),
    [
        (["--chrome-trace", "x"], ["--chrome-trace-file", "x"]),
        (["--chrome-trace=x"], ["--chrome-trace-file=x"]),
        (["--chrome_trace=x"], ["--chrome-trace-file=x"]),
        (["--quantize-backbone-linear-action", "FP8"], ["--quantize-non-expert-linear-action", "FP8"]),
        (["--json"], ["--json=-"]),
        (["--json", "-"], ["--json=-"]),
        (["--json", "x"], ["--json", "x"]),
        (["--json", "--compile"], ["--json=-", "--compile"]),
        (["--json", "-", "--compile"], ["--json=-", "--compile"]),
        (["--compilation-config"], ["--compilation-config"]),
        (["--", "--chrome-trace", "--json"], ["--", "--chrome-trace", "--json"]),
    ],
)
def test_older_spellings(arguments: list[str], normal: list[str]) -> None:
    assert normalize(arguments) == normal


def test_older_spelling_of_the_non_expert_format(scenario_of: Any) -> None:
    quant = scenario_of("--quantize-backbone-linear-action", "W8A16_STATIC").quant
    assert quant == Quant(quantize_non_expert_linear_action="W8A16_STATIC")


def test_a_config_can_turn_multistream_off(scenario_of: Any) -> None:
    config = '{"enable_multistream": false}'
    assert scenario_of("--compile", "--compilation-config", config).compilation.enable_multistream is False


@pytest.mark.parametrize(
    ("flags", "workload"),
    [
        (WorkloadFlags(), Workload()),
        (WorkloadFlags(num_queries=4, context_length=7), Workload(num_queries=4, context_length=7)),
        (WorkloadFlags(context_length=(7, 9)), Workload(context_length=(7, 9))),
        (
            WorkloadFlags(num_queries=2, query_length=(3, 4), context_length=9),
            Workload(num_queries=2, query_length=(3, 4), context_length=9),
        ),
    ],
)
def test_lengths_per_request(flags: WorkloadFlags, workload: Workload) -> None:
    assert flags.workload == workload


def test_workload_flags_are_the_fields_of_workload() -> None:
    assert [item.name for item in fields(WorkloadFlags)] == [item.name for item in fields(Workload)]


def test_every_field_has_help_from_its_docstring() -> None:
    texts = flag_help()
    classes = (Workload, Parallel, Quant, Mtp, Compilation)
    names = {f"--{item.name.replace('_', '-')}" for cls in classes for item in fields(cls)}
    assert names <= texts.keys()
    assert "--tp-size" in texts["--dcp-size"]
    assert texts["--quantize-linear-action"] == "Format of the linear layers, experts included."
    # A text may go on over several lines.
    assert texts["--mtp-acceptance-length"].endswith(".")
    assert "  " not in texts["--mtp-acceptance-length"]


def test_help_shows_every_flag_with_its_help(capsys: Capture) -> None:
    assert exit_status("cast", "--help") == 0
    page = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in ("num-queries", "tp-size", "quantize-linear-action", "num-mtp-tokens", "compile", "json", "device"):
        assert f"--{name} " in page
    assert "Format of the linear layers, experts included." in page
    assert "--no-compile" not in page
    assert "--no-enable-multistream" in page


def test_no_arguments_is_the_help_page(capsys: Capture) -> None:
    assert exit_status() == 0
    without = capsys.readouterr().out
    assert exit_status("--help") == 0
    assert capsys.readouterr().out == without
    assert all(command in without for command in ("cast", "models", "devices", "show", "shapes"))


def test_the_compilers_options_are_those_of_the_dataclass() -> None:
    assert set(COMPILATION_NAMES) == {
        *("enable_multistream", "enable_sequence_parallel", "enable_matmul_allreduce", "enable_dispatch_ffn_combine")
    }
