"""The arithmetic of drafting: tokens of a round, its cost and the speedup. The page "Cost model" derives it.

Pure functions on numbers. They assume that all drafted tokens are accepted with the same probability, independently. The unit
of cost is a forward pass of the target over one token of each row.
"""

from __future__ import annotations

__all__ = ["expected_tokens", "speedup", "verify_cost"]


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per pass of a chain, the target's own included, if each drafted token is accepted with this probability
    (2211.17192).

    Args:
        acceptance: probability that a drafted token is accepted once those before it are.
        length: drafted tokens.
    """
    return float(length + 1) if acceptance >= 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def verify_cost(length: int, rows: int = 1, position: float = 0.0) -> float:
    """Cost of the forward pass that verifies a draft, if the time of a pass is linear in the number of its positions.

    Args:
        length: drafted tokens in each row; the pass also reads the last token of the text.
        rows: of the batch. The baseline's pass reads one token of each.
        position: what each further position costs, in forward passes over one token of one row.
    """
    return (1 + position * (rows * (length + 1) - 1)) / (1 + position * (rows - 1))


def speedup(acceptance: float, cost: float, length: int, verify: float = 1.0) -> float:
    """Speedup over the autoregressive baseline: tokens of a round, divided by what it costs.

    Args:
        acceptance: probability that a drafted token is accepted once those before it are.
        cost: of a drafted token.
        length: drafted tokens.
        verify: cost of the forward pass that verifies them; see `verify_cost`.
    """
    return expected_tokens(acceptance, length) / (verify + cost * length)
