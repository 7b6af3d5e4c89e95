"""Command lines that several tests share."""

from typing import Any

from castoff.cli import main

MODEL, DEVICE = "zai-org/GLM-5.2", "ATLAS_800_A3_752T_128G_DIE"
CAST = ["cast", MODEL, "--device", DEVICE]
TP16 = ["--num-devices", "16", "--tp-size", "16", "--ep-size", "16"]
# The command of the published design, with the program's name exchanged.
PUBLISHED = [
    *("cast", "zai-org/GLM-5.2", "--device", "ATLAS_800_A3_752T_128G_DIE", "--num-devices", "16", "--tp-size", "16"),
    *("--dp-size", "1", "--ep-size", "16", "--context-length", "61000", "--query-length", "4096"),
    *("--num-queries", "1", "--num-mtp-tokens", "3", "--compile", "--quantize-linear-action", "W4A8_STATIC"),
    "--dump-input-shapes",
]


CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_attention_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "index_topk": 16,
    "index_n_heads": 16, "index_head_dim": 16, "max_position_embeddings": 512, "num_hidden_layers": 3,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "num_nextn_predict_layers": 1,
    "norm_topk_prob": True, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""A model of three layers that is run in a fraction of a second."""


def exit_status(*arguments: str) -> int:
    """Run castoff in this process; help pages end by returning, never by SystemExit."""
    return main(list(arguments))
