"""Attention of single columns over lists of slots, for `fixed_width`: a column's sums do not depend on other columns.

Every column reads its keys in the order of its list, in spans of `SPAN` that run side by side and are then joined in order, as
Flash-Decoding does (https://pytorch.org/blog/flash-decoding). Imports Triton, which torch brings on Linux with CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPAN = 512  # keys that one program reads
BLOCK = 32  # keys that are read at a time
_HEADS = 16  # query heads of a program, at least: the rows of a tile


@triton.jit(do_not_specialize=["longest"])
def _read_spans(  # type: ignore[no-untyped-def]
    query, keys, values, rows, lists, counts, sums, tops, totals,
    scaling, longest, query_head, query_column, key_row, key_head, key_slot, value_row, value_head, value_slot,
    size: tl.constexpr, wide: tl.constexpr, group: tl.constexpr, heads: tl.constexpr, span: tl.constexpr,
    block: tl.constexpr, exactly: tl.constexpr,
):  # fmt: skip
    """The softmax of one column, one key head and one span, not normed: sums [heads, wide], largest scores, totals [heads]."""
    column, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + column)
    first = part * span
    if first < count:
        row = tl.load(rows + column)
        of_heads, inside = tl.arange(0, heads), tl.arange(0, wide)
        shown = (of_heads < group)[:, None] & (inside < size)[None, :]
        where = query + (head * group + of_heads)[:, None] * query_head + column * query_column + inside[None, :]
        asked = tl.load(where, mask=shown, other=0.0)
        top = tl.full([heads], float("-inf"), tl.float32)
        total = tl.zeros([heads], tl.float32)
        made = tl.zeros([heads, wide], tl.float32)
        for at in range(first, tl.minimum(first + span, count), block):
            number = at + tl.arange(0, block)
            there = number < count
            slot = tl.load(lists + column.to(tl.int64) * longest + number, mask=there, other=0).to(tl.int64)
            both = there[:, None] & (inside < size)[None, :]
            key = tl.load(
                keys + row * key_row + head * key_head + slot[:, None] * key_slot + inside[None, :],
                mask=both,
                other=0.0,
            )
            value = tl.load(
                values + row * value_row + head * value_head + slot[:, None] * value_slot + inside[None, :],
                mask=both,
                other=0.0,
            )
            if exactly:
                scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
            else:
                scores = tl.dot(asked, tl.trans(key)) * scaling
            scores = tl.where(there[None, :], scores, float("-inf"))
            larger = tl.maximum(top, tl.max(scores, 1))
            share = tl.exp(scores - larger[:, None])
            kept = tl.exp(top - larger)
            total = total * kept + tl.sum(share, 1)
            if exactly:
                made = made * kept[:, None] + tl.dot(share, value, input_precision="ieee")
            else:
                made = made * kept[:, None] + tl.dot(share.to(value.dtype), value)
            top = larger
        place = ((column * tl.num_programs(1) + head) * tl.num_programs(2) + part) * heads + of_heads
        tl.store(sums + place[:, None] * wide + inside[None, :], made)
        tl.store(tops + place, top)
        tl.store(totals + place, total)


@triton.jit(do_not_specialize=["parts"])
def _join_spans(  # type: ignore[no-untyped-def]
    made, counts, sums, tops, totals, parts, made_head, made_column,
    size: tl.constexpr, wide: tl.constexpr, group: tl.constexpr, heads: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """Join the spans of one column and one key head in order."""
    column, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + column)
    of_heads, inside = tl.arange(0, heads), tl.arange(0, wide)
    top = tl.full([heads], float("-inf"), tl.float32)
    total = tl.zeros([heads], tl.float32)
    whole = tl.zeros([heads, wide], tl.float32)
    for part in range(0, tl.cdiv(count, span)):
        place = ((column * tl.num_programs(1) + head) * parts + part) * heads + of_heads
        other = tl.load(tops + place)
        larger = tl.maximum(top, other)
        kept, taken = tl.exp(top - larger), tl.exp(other - larger)
        total = total * kept + tl.load(totals + place) * taken
        added = tl.load(sums + place[:, None] * wide + inside[None, :])
        whole = whole * kept[:, None] + added * taken[:, None]
        top = larger
    where = made + (head * group + of_heads)[:, None] * made_head + column * made_column + inside[None, :]
    shown = (of_heads < group)[:, None] & (inside < size)[None, :]
    tl.store(where, (whole / total[:, None]).to(made.dtype.element_ty), mask=shown)


def attend(
    made: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    scaling: float,
) -> None:
    """Write the attention of n columns to `made`.

    made, query: [H, at least n, D]. keys, values: [R, G, S, D], where a group of H / G query heads reads the same keys.
    rows: [n] int64, of each column. lists: [n, any] int32, the slots that it sees, of which `counts`, [n] int32, are valid; at
    least one.
    """
    columns, longest = lists.shape
    size, of_keys = query.shape[-1], keys.shape[1]
    group = query.shape[0] // of_keys
    wide, heads = max(16, triton.next_power_of_2(size)), max(_HEADS, triton.next_power_of_2(group))
    parts = -(-longest // SPAN)
    sums = query.new_empty(columns, of_keys, parts, heads, wide, dtype=torch.float32)
    tops, totals = (query.new_empty(columns, of_keys, parts, heads, dtype=torch.float32) for _ in range(2))
    shapes = {"size": size, "wide": wide, "group": group, "heads": heads, "span": SPAN}
    _read_spans[(columns, of_keys, parts)](
        *(query, keys, values, rows, lists, counts, sums, tops, totals, scaling, lists.stride(0)),
        *(query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3]),
        **shapes,
        block=BLOCK,
        exactly=query.dtype == torch.float32,
    )
    _join_spans[(columns, of_keys)](made, counts, sums, tops, totals, parts, made.stride(0), made.stride(1), **shapes)
