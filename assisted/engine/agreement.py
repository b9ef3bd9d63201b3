"""Whether two ways to compute the same logits agree: the one measure and the one table of tolerances.

A trial compares a fused, packed, captured or divided model with the model itself before it may stand in for it.
"""

from __future__ import annotations

import torch

ROUNDING = {torch.float64: 3e-4, torch.float32: 3e-4, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far apart logits may be that differ by rounding alone, as `apart` measures it. Kernels for another number of rows, or
another order of sums, differ by 1e-6 in float32 and by 0.02 in bfloat16; wrong positions, masks or states, by 0.01 to 1."""


def rounding_of(dtype: torch.dtype) -> float:
    """The entry of `ROUNDING`; of other dtypes, that of half precision."""
    return ROUNDING.get(dtype, 0.1)


def apart(found: torch.Tensor, expected: torch.Tensor, by_position: bool = False) -> float:
    """Root mean square difference of logits [..., V], relative to the standard deviation of the expected ones.

    Entries that are both infinite or both NaN are equal; an entry that is NaN on one side only makes the result NaN.
    by_position: the median over the positions instead of the mean. In half precision, rounding occasionally routes a token to
    another expert, while a wrong state shows at every position.
    """
    found, expected = found.float(), expected.to(found.device).float()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    squares = (found - expected).masked_fill(same, 0).square().mean(-1)
    middle = squares.median() if by_position else squares.mean()
    return float(middle.sqrt() / expected[expected.isfinite()].std())


def agree(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits [..., V] differ by no more than rounding. dtype: the coarsest in which either was computed."""
    return apart(found, expected) <= rounding_of(dtype)
