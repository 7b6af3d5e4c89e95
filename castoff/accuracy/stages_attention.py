"""The stages that fit sparse attention: its kernels alone, then whole modules in decode and in prefill."""

from __future__ import annotations

from collections.abc import Mapping

from castoff.accuracy.recipe import Recipe, Robustness
from castoff.accuracy.stage import Stage

_REQUESTS = ("batch_size", "isl")

_HOST = frozenset({"host_s", "far_host_s"})

KERNEL_STAGES: tuple[Stage, ...] = (
    Stage(
        name="indexer scores",
        tables=("glm5_mqa_logits_module",),
        series=("glm5_mqa_logits",),
        sites=_REQUESTS,
        recipes={
            "indexer_logits_fp8_prefill": Recipe(
                form="ragged_logits",
                knots={
                    "queries": (1, 32, 128, 512, 1024, 2048, 8192, 65536),
                    "context": (8, 128, 1024, 4096, 16384, 65536, 262144),
                    "per_request": (1, 4, 16, 256, 4096),
                },
            )
        },
    ),
    Stage(
        name="selection",
        tables=("glm5_topk_module",),
        series=("glm5_topk",),
        sites=_REQUESTS,
        recipes={
            name: Recipe(
                form="topk",
                knots={
                    "selecting": (1, 16, 64, 128, 256, 512, 1024, 4096, 32768),
                    "length": (2049, 2560, 4096, 8192, 16384, 32768, 65536, 262144),
                },
            )
            for name in ("topk_flat", "topk_top_last")
        },
    ),
    Stage(
        name="sparse attention",
        tables=("glm5_dsa_attn_module",),
        series=("glm5_dsa_attn",),
        sites=_REQUESTS,
        recipes={
            "sparse_attention_bf16_prefill": Recipe(
                form="prefill_attention",
                held=frozenset({"padding", *_HOST}),
                knots={
                    "queries": (1, 16, 64, 128, 160, 256, 320, 512, 2048, 65536),
                    "visible": (8, 256, 2048),
                },
            )
        },
    ),
)

_FORMATS = ("bf16", "fp8_block")

_DECODE: Mapping[str, Recipe] = {
    **{f"mlapo_{name}_decode": Recipe(form="projection", held=_HOST) for name in _FORMATS},
    **{f"indexer_project_{name}_decode": Recipe(form="indexer_projection", held=_HOST) for name in _FORMATS},
    "indexer_logits_fp8_decode": Recipe(form="paged_logits"),
    "topk_decode": Recipe(
        form="topk",
        held=frozenset({"near_keys", "rows_per_core", "short_s", "crowding"}),
        start={"short_s": 1e-9},
    ),
    **{
        f"sparse_attention_{name}_decode": Recipe(
            form="decode_attention",
            knots={
                "queries": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
                "visible": (8, 128, 512, 1024, 2048),
                "heads": (8, 16, 32, 64),
            },
        )
        for name in ("bf16", "fp8")
    },
    "absorb_decode": Recipe(form="projection", held=_HOST),
}

_PREFILL: Mapping[str, Recipe] = {
    **{f"mlapo_{name}_prefill": Recipe(form="projection") for name in _FORMATS},
    **{f"indexer_project_{name}_prefill": Recipe(form="indexer_projection") for name in _FORMATS},
    "topk_prefill": Recipe(
        form="topk", refines=frozenset({"row_s", "pass_s", "near_key_s", "far_key_s"}), of="topk_flat"
    ),
    "sparse_attention_bf16_prefill": Recipe(form="prefill_attention", refines=frozenset({"padding", *_HOST})),
    "sparse_attention_fp8_prefill": Recipe(form="prefill_attention"),
    "absorb_prefill": Recipe(form="absorbed_or_dense", held=frozenset({"host_s"}), start={"host_s": 1e-9}),
}

MODULE_STAGES: tuple[Stage, ...] = (
    Stage(
        name="attention modules in decode",
        tables=("dsa_generation_module",),
        series=("dsa_generation_module", "dsa_generation_module_skip_indexer"),
        sites=("batch_size", "tp_size"),
        recipes=_DECODE,
        how=Robustness(prior=1e-5, most_rows=3000, steps=25, ridge=1e-5, smooth=1e-4),
    ),
    Stage(
        name="attention modules in prefill",
        tables=("dsa_context_module",),
        series=("dsa_context_module", "dsa_context_module_skip_indexer"),
        # Half of these rows are slower than the same layer with its indexer: something else used the device.
        untrusted={"h200_sxm": ("dsa_context_module_skip_indexer",)},
        sites=("batch_size", "isl", "tp_size"),
        recipes=_PREFILL,
        how=Robustness(prior=1e-4, most_rows=3000, steps=25),
    ),
)
