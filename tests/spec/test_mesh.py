"""Groups of ranks from parallel sizes, and the sentence that refuses sizes that cannot work."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castoff.errors import CastoffError
from castoff.spec.mesh import Group, Mesh, resolve_mesh
from castoff.spec.scenario import Parallel
from tests.generators import DEEPSEEK_V3, DEEPSEEK_V32, GLM_5, model, parallels

GROUPS = ("tp", "dp", "pp", "dcp", "ep", "moe_tp", "o_proj_tp", "mlp_tp", "lmhead_tp", "embed_tp")


def mesh_of(**sizes: Any) -> Mesh:
    return resolve_mesh(model(), Parallel(**sizes))


def refusal(name: str = "zai-org/GLM-5.2", **sizes: Any) -> str:
    with pytest.raises(CastoffError) as caught:
        resolve_mesh(model(name), Parallel(**sizes))
    return str(caught.value)


def verdict(**sizes: Any) -> str | None:
    """The sentence that refuses these sizes, or None where they fit."""
    try:
        mesh_of(**sizes)
    except CastoffError as error:
        return str(error)
    return None


class TestDefaults:
    def test_one_device(self) -> None:
        mesh = mesh_of()
        assert all(getattr(mesh, name).size == 1 for name in GROUPS)
        assert mesh.experts_per_rank == 256

    def test_parts_follow_the_tp_size(self) -> None:
        mesh = mesh_of(num_devices=16, tp_size=4, ep_size=16)
        assert [getattr(mesh, name).size for name in GROUPS] == [4, 4, 1, 1, 16, 1, 4, 4, 4, 1]

    def test_without_ep_experts_are_split_over_a_whole_stage(self) -> None:
        assert mesh_of(num_devices=32, tp_size=4, pp_size=2).moe_tp == Group("moe_tp", 16)

    def test_what_is_left_of_the_experts_ranks_is_their_tp(self) -> None:
        mesh = mesh_of(num_devices=16, tp_size=16, ep_size=4, moe_dp_size=2)
        assert (mesh.ep, mesh.moe_tp) == (Group("ep", 4, 2), Group("moe_tp", 2))

    @pytest.mark.parametrize("part", ["o_proj", "mlp", "lmhead"])
    def test_a_parts_dp_twin_says_the_same_from_the_other_side(self, part: str) -> None:
        base: dict[str, Any] = {"num_devices": 16, "tp_size": 4, "ep_size": 16}
        by_tp = mesh_of(**base, **{f"{part}_tp_size": 8})
        by_dp = mesh_of(**base, **{f"{part}_dp_size": 2})
        both = mesh_of(**base, **{f"{part}_tp_size": 8, f"{part}_dp_size": 2})
        assert getattr(by_tp, f"{part}_tp") == getattr(by_dp, f"{part}_tp") == getattr(both, f"{part}_tp")
        assert getattr(by_tp, f"{part}_tp").size == 8

    @pytest.mark.parametrize(("kind", "size", "expected"), [(None, None, 1), ("row", None, 4), ("col", 16, 16)])
    def test_embedding(self, kind: str | None, size: int | None, expected: int) -> None:
        base: dict[str, Any] = {"num_devices": 16, "tp_size": 4, "ep_size": 16}
        assert mesh_of(**base, word_embedding_tp=kind, word_embedding_tp_size=size).embed_tp.size == expected


class TestRanks:
    """Ranks are numbered TP innermost, then attention DP, then PP."""

    def test_strides(self) -> None:
        mesh = mesh_of(num_devices=64, tp_size=4, pp_size=2, ep_size=8, moe_dp_size=2, dcp_size=2)
        assert mesh.tp == Group("tp", 4, 1)
        assert mesh.dp == Group("dp", 8, 4)
        assert mesh.pp == Group("pp", 2, 32)
        assert mesh.dcp == Group("dcp", 2, 1)
        assert mesh.moe_tp == Group("moe_tp", 2, 1)
        assert mesh.ep == Group("ep", 8, 2)
        assert mesh.stage_ranks == 32

    @pytest.mark.property
    @given(parallel=parallels(model()))
    def test_groups_partition_the_ranks(self, parallel: Parallel) -> None:
        mesh = resolve_mesh(model(), parallel)
        assert mesh.tp.size * mesh.dp.size * mesh.pp.size == parallel.num_devices
        assert mesh.stage_ranks * mesh.pp.size == parallel.num_devices
        assert mesh.ep.size * mesh.moe_tp.size * parallel.moe_dp_size == mesh.stage_ranks
        for name in GROUPS:
            group = getattr(mesh, name)
            assert group.name == name
            inside = parallel.num_devices if name == "pp" else mesh.stage_ranks
            assert inside % (group.size * group.stride) == 0

    @pytest.mark.property
    @given(parallel=parallels(model()))
    def test_tp_dp_and_pp_coordinates_name_each_rank_once(self, parallel: Parallel) -> None:
        mesh = resolve_mesh(model(), parallel)
        ranks = [
            sum(index * group.stride for index, group in zip(indices, (mesh.tp, mesh.dp, mesh.pp), strict=True))
            for indices in (
                (t, d, p) for t in range(mesh.tp.size) for d in range(mesh.dp.size) for p in range(mesh.pp.size)
            )
        ]
        assert sorted(ranks) == list(range(parallel.num_devices))


class TestExperts:
    @pytest.mark.property
    @given(parallel=parallels(model()))
    def test_every_expert_has_a_rank(self, parallel: Parallel) -> None:
        mesh = resolve_mesh(model(), parallel)
        routed_ranks = mesh.ep.size - mesh.shared_expert_ranks
        assert mesh.experts_per_rank * routed_ranks >= 256
        assert (mesh.experts_per_rank - 2) * routed_ranks < 256

    @pytest.mark.parametrize(("redundant", "experts"), [(False, 16), (True, 17)])
    def test_redundant_experts(self, redundant: bool, experts: int) -> None:
        mesh = mesh_of(num_devices=16, tp_size=16, ep_size=16, enable_redundant_experts=redundant)
        assert mesh.experts_per_rank == experts

    @pytest.mark.parametrize(
        ("ep", "shared", "experts"),
        [
            # One rank in 8 (num_experts_per_tok), at least one.
            (2, 1, 256),
            (8, 1, 37),
            (16, 2, 19),
            (64, 8, 5),
        ],
    )
    def test_external_shared_experts(self, ep: int, shared: int, experts: int) -> None:
        mesh = mesh_of(num_devices=ep, tp_size=1, ep_size=ep, enable_external_shared_experts=True)
        assert (mesh.shared_expert_ranks, mesh.experts_per_rank) == (shared, experts)


MISFITS: list[tuple[dict[str, Any], list[str]]] = [
    # sizes, what the message must name: flags, what was given, what is allowed
    ({"num_devices": 16, "tp_size": 5}, ["--tp-size 5", "16 devices", "[1, 2, 4, 8, 16]"]),
    (
        {"num_devices": 16, "tp_size": 16, "pp_size": 2},
        ["--tp-size 16", "8 devices of a pipeline stage", "[1, 2, 4, 8]"],
    ),
    ({"num_devices": 16, "pp_size": 3}, ["--pp-size 3", "--num-devices 16", "[1, 2, 4, 8, 16]"]),
    ({"num_devices": 16, "moe_dp_size": 3}, ["--moe-dp-size 3", "16 devices", "[1, 2, 4, 8, 16]"]),
    ({"num_devices": 16, "ep_size": 16, "moe_dp_size": 2}, ["--ep-size 16", "--moe-dp-size 2", "[1, 2, 4, 8]"]),
    ({"num_devices": 96, "tp_size": 96}, ["--tp-size 96", "64 attention heads", "[1, 2, 4, 8, 16, 32]"]),
    ({"num_devices": 48, "tp_size": 16, "o_proj_tp_size": 48}, ["--o-proj-tp-size 48", "64 attention heads"]),
    ({"num_devices": 16, "tp_size": 4, "dp_size": 2}, ["--dp-size 2", "= 8", "--num-devices 16", "use 4"]),
    ({"num_devices": 16, "tp_size": 4, "dp_size": 8}, ["--dp-size 8", "= 32", "--num-devices 16", "use 4"]),
    ({"num_devices": 16, "tp_size": 16, "dcp_size": 3}, ["--dcp-size 3", "--tp-size 16"]),
    ({"num_devices": 16, "tp_size": 4, "dcp_size": 8}, ["--dcp-size 8", "--tp-size 4"]),
    ({"num_devices": 16, "tp_size": 16, "ep_size": 5}, ["--ep-size 5", "16 devices", "[1, 2, 4, 8, 16]"]),
    (
        {"num_devices": 96, "tp_size": 32, "ep_size": 96},
        ["--ep-size 96", "256 routed experts", "[1, 2, 4, 8, 16, 32]"],
    ),
    (
        {"num_devices": 16, "tp_size": 16, "ep_size": 4, "moe_tp_size": 2},
        ["--moe-tp-size 2", "--ep-size 4", "--moe-dp-size 1", "= 8", "16 devices", "use 4"],
    ),
    ({"num_devices": 3, "tp_size": 1}, ["--moe-tp-size 3", "moe_intermediate_size 2048"]),
    ({"num_devices": 9, "ep_size": 1, "moe_dp_size": 9, "mlp_tp_size": 9}, ["--mlp-tp-size 9", "12288"]),
    ({"num_devices": 6, "ep_size": 2, "moe_dp_size": 3, "lmhead_tp_size": 6}, ["--lmhead-tp-size 6", "154880"]),
    ({"num_devices": 16, "ep_size": 16, "o_proj_tp_size": 5}, ["--o-proj-tp-size 5", "16 devices"]),
    (
        {"num_devices": 16, "ep_size": 16, "mlp_tp_size": 8, "mlp_dp_size": 4},
        ["--mlp-tp-size 8", "--mlp-dp-size 4", "16 devices"],
    ),
    ({"num_devices": 16, "ep_size": 16, "lmhead_dp_size": 3}, ["--lmhead-dp-size 3", "16 devices"]),
    (
        {"num_devices": 24, "tp_size": 8, "ep_size": 8, "mlp_tp_size": 12},
        ["--mlp-tp-size 12", "--tp-size 8", "divide"],
    ),
    (
        {"num_devices": 24, "tp_size": 8, "ep_size": 1, "moe_tp_size": 12, "moe_dp_size": 2},
        ["--moe-tp-size 12", "--tp-size 8", "divide"],
    ),
    ({"num_devices": 16, "ep_size": 16, "word_embedding_tp_size": 4}, ["--word-embedding-tp-size 4", "row or col"]),
    (
        {"num_devices": 16, "tp_size": 4, "ep_size": 16, "word_embedding_tp": "row", "word_embedding_tp_size": 2},
        ["--word-embedding-tp-size 2", "--tp-size 4"],
    ),
    (
        {"num_devices": 6, "ep_size": 2, "moe_dp_size": 3, "word_embedding_tp": "row", "word_embedding_tp_size": 3},
        ["--word-embedding-tp-size 3", "vocab_size 154880"],
    ),
    (
        {"num_devices": 10, "ep_size": 2, "moe_dp_size": 5, "word_embedding_tp": "col", "word_embedding_tp_size": 5},
        ["--word-embedding-tp-size 5", "hidden_size 6144"],
    ),
    ({"num_devices": 22, "pp_size": 22}, ["--pp-size 22", "21"]),
    ({"host_external_shared_experts": True}, ["--host-external-shared-experts", "--enable-external-shared-experts"]),
    (
        {"num_devices": 16, "ep_size": 8, "enable_external_shared_experts": True},
        ["--enable-external-shared-experts", "--ep-size 16", "8"],
    ),
    ({"enable_external_shared_experts": True}, ["--enable-external-shared-experts", "2 devices"]),
    (
        {"num_devices": 2, "ep_size": 2, "enable_external_shared_experts": True, "enable_shared_expert_tp": True},
        ["--enable-shared-expert-tp", "--enable-external-shared-experts"],
    ),
    ({"num_devices": 16, "tp_size": 16, "enable_shared_expert_tp": True}, ["--enable-shared-expert-tp", "--ep-size"]),
    ({"expert_load_imbalance": 0.9}, ["--expert-load-imbalance", "0.9", "1"]),
    ({"expert_load_imbalance": float("nan")}, ["--expert-load-imbalance", "nan"]),
]


class TestErrors:
    @pytest.mark.parametrize(("sizes", "named"), MISFITS, ids=[" ".join(map(str, sizes)) for sizes, _ in MISFITS])
    def test_message_names_flag_and_allowed_values(self, sizes: dict[str, Any], named: list[str]) -> None:
        message = refusal(**sizes)
        for text in named:
            assert text in message, message

    @pytest.mark.parametrize(
        "field",
        [
            "num_devices", "tp_size", "dp_size", "pp_size", "dcp_size", "ep_size", "moe_tp_size", "moe_dp_size",
            "o_proj_tp_size", "o_proj_dp_size", "mlp_tp_size", "mlp_dp_size", "lmhead_tp_size", "lmhead_dp_size",
            "word_embedding_tp_size",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("value", [0, -1, 1.5, True])
    def test_sizes_are_whole_and_positive(self, field: str, value: Any) -> None:
        message = refusal(**{field: value})
        assert f"--{field.replace('_', '-')}" in message
        assert repr(value) in message
        assert "at least 1" in message

    @pytest.mark.parametrize(
        ("sizes", "flag"),
        [
            ({"num_devices": 16, "pp_size": 3}, "pp_size"),
            ({"num_devices": 16, "ep_size": 16, "moe_dp_size": 2}, "ep_size"),
            ({"num_devices": 16, "moe_dp_size": 3}, "moe_dp_size"),
            ({"num_devices": 16, "tp_size": 5}, "tp_size"),
            ({"num_devices": 96, "tp_size": 32, "ep_size": 96}, "ep_size"),
            ({"num_devices": 96, "tp_size": 96}, "tp_size"),
        ],
    )
    def test_a_proposed_value_is_not_refused_with_the_same_sentence(self, sizes: dict[str, Any], flag: str) -> None:
        first = refusal(**sizes)
        (proposed,) = re.findall(r"\[(.*)\]", first)
        for size in proposed.split(", "):
            again = verdict(**(sizes | {flag: int(size)}))
            assert again is None or re.sub(r"[\d, ]+", "", again) != re.sub(r"[\d, ]+", "", first), again

    @pytest.mark.parametrize(("name", "heads"), [(GLM_5, 64), (DEEPSEEK_V32, 128), (DEEPSEEK_V3, 128)])
    def test_heads_are_the_models(self, name: str, heads: int) -> None:
        assert f"{heads} attention heads of {name}" in refusal(name, num_devices=192, tp_size=192, ep_size=64)

    def test_a_model_without_shared_experts_has_none_to_move(self) -> None:
        spec = replace(model(), moe=replace(model().moe, n_shared_experts=0))
        with pytest.raises(CastoffError, match="no shared expert"):
            resolve_mesh(spec, Parallel(num_devices=2, ep_size=2, enable_external_shared_experts=True))

    @pytest.mark.property
    @given(
        sizes=st.fixed_dictionaries(
            {
                "num_devices": st.integers(1, 64),
                "tp_size": st.integers(1, 64),
                "pp_size": st.integers(1, 5),
                "ep_size": st.integers(1, 64),
                "dcp_size": st.integers(1, 4),
                "moe_dp_size": st.integers(1, 4),
            },
            optional={
                "dp_size": st.integers(1, 8),
                "moe_tp_size": st.integers(1, 8),
                "o_proj_tp_size": st.integers(1, 16),
                "mlp_dp_size": st.integers(1, 16),
                "lmhead_tp_size": st.integers(1, 16),
                "word_embedding_tp": st.sampled_from(["row", "col"]),
                "enable_shared_expert_tp": st.booleans(),
                "enable_external_shared_experts": st.booleans(),
            },
        )
    )
    def test_any_sizes_either_fit_or_are_refused_with_a_flag(self, sizes: dict[str, Any]) -> None:
        message = verdict(**sizes)
        if message is not None:
            assert re.search(r"--[a-z]+-[a-z-]+", message), message
            return
        mesh = mesh_of(**sizes)
        assert mesh.tp.size * mesh.dp.size * mesh.pp.size == sizes["num_devices"]
        assert 64 % mesh.tp.size == 0
