"""Rotary embedding tables, default and yarn, as Hugging Face's models compute them."""

from __future__ import annotations

import math

import lazy_loader as lazy

from castoff.ops.program import Tensor
from castoff.spec.model import RopeSpec

torch = lazy.load("torch")


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """1 / theta^(2i / dim), fp32, (dim / 2,); yarn blends them with their 1/factor for slow dimensions.

    Source: Peng et al., YaRN (arXiv 2309.00071), sections 3.2 and A.2.
    """
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.type == "default":
        return plain
    assert rope.original_max_position_embeddings is not None

    def dim_of(rotations: float) -> float:
        """The dimension whose wave turns `rotations` times over the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)  # type: ignore[operator]
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: 1 for default rope, and for yarn with equal mscale and mscale_all_dim."""
    if rope.type == "default":
        return 1.0
    return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_tables(positions_T: Tensor, rope: RopeSpec, dim: int, dtype: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles at some positions, each (T, dim): the dim / 2 angles twice."""
    frequencies = inverse_frequencies(rope, dim).to(positions_T.device)
    angles = positions_T[:, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    scale = attention_factor(rope)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
