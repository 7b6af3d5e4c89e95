"""All ops, written out once."""

from __future__ import annotations

from castoff.ops import attention, collectives, dsa_indexer, linear, mlapo, moe, norm, tokens
from castoff.ops.program import Op

OPS: tuple[Op, ...] = (
    tokens.EMBEDDING,
    tokens.SELECT_ROWS,
    tokens.CONCAT,
    tokens.SAMPLE,
    norm.RMS_NORM,
    norm.RMS_NORM_DYNAMIC_QUANT,
    norm.ADD_RMS_NORM,
    norm.ADD_RMS_NORM_DYNAMIC_QUANT,
    norm.ADD_RMS_NORM2,
    norm.ADD_RMS_NORM2_DYNAMIC_QUANT,
    norm.ADD,
    linear.QUANTIZE,
    linear.DYNAMIC_QUANTIZE,
    linear.LINEAR,
    linear.LINEAR_QUANT,
    mlapo.MLAPO,
    mlapo.MLAPO_QUANT,
    dsa_indexer.DSA_INDEXER,
    dsa_indexer.INDEXER_KEY_WRITE,
    dsa_indexer.MERGE_TOPK,
    attention.SPARSE,
    attention.SPARSE_QUANT,
    attention.DENSE,
    attention.DENSE_QUANT,
    moe.MOE_GATE,
    moe.MOE_PERMUTE,
    moe.MOE_UNPERMUTE,
    moe.GROUPED_MATMUL,
    moe.GROUPED_MATMUL_QUANT,
    moe.GROUPED_MATMUL_SWIGLU,
    moe.GROUPED_MATMUL_QUANT_SWIGLU,
    moe.SWIGLU,
    collectives.ALL_REDUCE,
    collectives.ALL_GATHER,
    collectives.REDUCE_SCATTER,
    collectives.ALL_TO_ALL,
    collectives.SEND_RECV,
    collectives.MATMUL_ALL_REDUCE,
    collectives.DISPATCH_FFN_COMBINE,
)
