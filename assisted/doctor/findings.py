"""What `assisted doctor` found, in words: a table or two, what they mean, and what to do.

Knows numbers that were measured; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill

from ..bench.statistics import Interval
from .comparison import Comparison
from .diagnosis import Diagnosis, Examination

__all__ = ["advice", "bottlenecks", "told"]

WIDTH = 110
PAYS = 1.03  # speedup below which drafting is not worth it
NEARLY_FREE = 1.25  # a pass over five tokens, in passes over one
HARDLY = 0.35  # overlap, or agreement, of two models that hardly agree
LOST = 0.85  # accepted, of what the two distributions allow
NEARLY = 0.8  # of the gain that the greatest obstacle stands in the way of
LOOPS = 0.2  # repeated 4-grams from which figures flatter
SHOWN = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
POSITIONS = 8
OFF = 0.15  # a prediction that misses by more is said to


def told(examination: Examination) -> str:
    """The report for a terminal."""
    parts = [_head(examination), _passes(examination), _memory(examination)]
    parts += ["\n".join(_diagnosis(one, examination)) for one in examination.drafts]
    parts.append("\n".join(["What to do", *(_item(line) for line in advice(examination))]))
    return "\n\n".join(parts)


def advice(examination: Examination) -> list[str]:
    """What to do, a sentence or two each."""
    ran = [one for one in examination.drafts if one.proposed > 0]
    if not ran:
        return ["No draft could be loaded, or none proposed anything; see above."]
    best = max(ran, key=_measured)
    expected, checked = best.speedup.ratio, _measured(best)
    without = 1.0 if examination.undrafted is None else max(1.0, examination.undrafted.ratio)
    lines = []
    if checked < PAYS * without:
        lines.append(
            f"Do not draft with {'any of these' if len(ran) > 1 else best.draft} here: {checked:.2f} times the speed of plain "
            f"decoding was measured, {without:.2f} without drafts ({expected:.2f} expected of long texts). "
            "draft_length='adaptive', the default, notices that by itself and decodes plainly."
        )
    else:
        others = f", the best of these {len(ran)}" if len(ran) > 1 else ""
        lines.append(
            f"Take draft={best.draft!r}{others}. draft_length='adaptive', the default, finds a length by itself; a fixed one "
            f"would be {best.best}. Measured in short calls: {checked:.2f} times the speed of plain decoding; to be expected "
            f"in long texts: {_times(best.speedup)}."
        )
    lines.append(_hint(best))
    if examination.plain_way != "plain" and "oneDNN" in examination.plain_way:
        lines.append(
            "Plain decoding is faster with oneDNN switched off (torch.backends.mkldnn.flags(enabled=False)): bfloat16 with one "
            "row is slow in it. Everything here is compared with that; float32 may be faster than both."
        )
    if examination.repeated_4grams > LOOPS:
        lines.append(
            f"{examination.repeated_4grams:.0%} of the 4-grams written occurred before in their text: the target repeats "
            "itself, which flatters every draft. Give text of your own, fewer new tokens or a temperature."
        )
    return lines


def bottlenecks(diagnosis: Diagnosis) -> list[str]:
    """What holds a draft back: of "draft", "acceptance" and "verify" that which would bring the most, and what comes near."""
    gains = {
        "draft": diagnosis.if_twice_as_fast,
        "verify": diagnosis.if_columns_cost_half,
        "acceptance": diagnosis.if_half_as_wrong,
    }
    ranked = sorted(gains, key=gains.__getitem__, reverse=True)
    least = diagnosis.speedup.ratio + NEARLY * (gains[ranked[0]] - diagnosis.speedup.ratio)
    return [name for place, name in enumerate(ranked) if place == 0 or gains[name] > least]


def _head(examination: Examination) -> str:
    machine = examination.machine
    where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    sampled = "greedy" if examination.temperature == 0 else f"temperature {examination.temperature:g}"
    lines = [
        f"{examination.target}: {_count(examination.parameters)} parameters, {machine['dtype']}, on {where}"
        + (f", {_plural(machine['threads'], 'thread')}" if machine["device"] == "cpu" else ""),
        f"text: {examination.text}, {_plural(examination.prompts, 'prompt')} of about {examination.prompt_tokens} tokens, "
        f"{examination.new_tokens} new ones each, {sampled}, batch 1",
        f"plain decoding: {1e3 * examination.plain_seconds:.3g} ms a token ({examination.plain_way}), which is 1.00 below",
    ]
    if examination.undrafted is not None:
        lines.append(f"this package without drafts: {_times(examination.undrafted)} that speed")
    if examination.note:
        lines.append(f"note: {examination.note}")
    return "\n".join(lines)


def _passes(examination: Examination) -> str:
    columns = sorted(examination.passes[0].seconds)
    rows = [["tokens of a pass", *map(str, columns)]]
    for times in examination.passes:
        onednn = {True: ", oneDNN", False: ", without", None: ""}[times.onednn]
        cells = [_milliseconds(times.seconds[n]) if n in times.seconds else "" for n in columns]
        rows.append([f"context {times.context}{onednn}", *cells])
    first = examination.passes[0].seconds
    ratio = min(first[n] for n in first if n >= 5) / first[1]
    free = (
        "Checking some tokens takes hardly longer than one: drafted tokens are nearly free to check."
        if ratio < NEARLY_FREE
        else "Checking is not free here: every drafted token costs some of what it may bring."
    )
    said = f"A pass over 5 tokens or more takes {ratio:.2f} times as long as over one, at the least. {free}"
    return f"Passes of the target, milliseconds\n{_table(rows)}\n{fill(said, WIDTH)}"


def _memory(examination: Examination) -> str:
    memory = examination.memory
    rate = f"{memory.bandwidth.low / 1e9:.3g} to {memory.bandwidth.high / 1e9:.3g} GB/s"
    if memory.weight_bytes is None or memory.share is None:
        said = f"Memory: {rate} by copying. How much of a mixture of experts a pass reads depends on its tokens."
        return fill(said, WIDTH)
    low, high = memory.share
    bound = 1e3 * memory.weight_bytes / memory.bandwidth.high
    said = (
        f"A pass reads {_bytes(memory.weight_bytes)} of weights. Memory gives {rate} here (measured by copying; reading alone "
        f"may be up to one and a half times as fast), so reading takes {bound:.2f} ms and a pass over one token reaches "
        f"{low:.0%} to {high:.0%} of the memory's speed. "
    )
    if high > 1:
        said += "That is more than all: the weights fit into caches."
    elif low > 0.6:
        said += "Memory is the limit, which is where drafting brings the most: more tokens a pass cost no more reading."
    elif low > 0.3:
        said += "Memory is a part of it; the rest goes into computing and into starting operations."
    else:
        said += "Memory is not the limit: computing, or starting operations one by one, is. "
        if examination.machine["device"] != "cpu":
            said += "A compiled forward may bring more than a better draft."
        elif examination.machine["dtype"] != "float32":
            said += f"float32 may be faster than {examination.machine['dtype']} on this processor."
        else:
            said += "More threads may help."
    return fill(said, WIDTH)


def _diagnosis(one: Diagnosis, examination: Examination) -> Iterator[str]:
    yield f"Draft {one.draft}"
    if one.error is not None:
        yield _item(f"refused: {one.error}")
        return
    if one.warned:
        yield _item(f"warned: {one.warned}")
    if one.proposed == 0:
        yield _item("It proposed nothing in all of the recorded run: there is nothing to expect of it here.")
        return
    passes = one.draft_seconds / one.pass_seconds
    what = "A whole draft" if one.blocks else "A drafted token"
    yield _item(f"{what} takes {_milliseconds(one.draft_seconds)} ms, {passes:.0%} of a pass over one token.")
    if one.proposed < 0.995:
        yield _item(f"It proposes something in {one.proposed:.0%} of the rounds.")
    if one.tree_columns is not None:
        yield _item(
            f"It proposes trees, of {one.tree_columns:.0f} nodes on average at its best depth. What other depths would bring "
            "is a rough estimate."
        )
    rows = [["position", *(str(n + 1) for n in range(min(POSITIONS, len(one.acceptance_by_position))))]]
    rows.append(["accepted", *(f"{share:.0%}" for share in one.acceptance_by_position[:POSITIONS])])
    if one.comparison is not None:
        rows.append(["at best", *(f"{share:.0%}" for share in one.comparison.best_by_position[: len(rows[0]) - 1])])
    yield _table(rows, "    ")
    if one.comparison is not None:
        yield from map(_item, _on_comparison(one.comparison, one))
    if one.translated:
        yield _item(
            "It has another tokenizer and is translated; the distributions of the two models cannot be compared."
        )
    shown = [one.expected[length] for length in SHOWN if length < len(one.expected)]
    rows = [
        ["draft length", *(str(e.length) if e.length else "none" for e in shown)],
        ["tokens a pass", *(f"{e.tokens_per_pass:.2f}" for e in shown)],
        ["expected speed", *(f"{e.speedup.ratio:.2f}" for e in shown)],
    ]
    yield _table(rows, "    ")
    yield _item(f"Best draft length: {one.best}, {_times(one.speedup)} the speed of plain decoding. {_what_if(one)}")
    for check in one.checks:
        same = f", {check.same} of {check.texts} texts the same" if check.same is not None else ""
        measured = (
            f"Measured, {check.way}: {_times(check.speedup)}{same} ({_plural(check.texts, 'call')}, prompts included)."
        )
        if check.predicted is not None:
            off = check.speedup.ratio / check.predicted - 1
            verdict = (
                "as predicted" if abs(off) <= OFF else f"{abs(off):.0%} {'more' if off > 0 else 'less'} than predicted"
            )
            measured += f" Predicted for these calls: {check.predicted:.2f}; {verdict}."
        yield _item(measured)


def _on_comparison(comparison: Comparison, one: Diagnosis) -> Iterator[str]:
    yield (
        f"The two models have the same top-1 token at {comparison.agreement:.0%} of the text; their distributions "
        f"overlap by {comparison.overlap:.0%} (1 minus the total variation, at temperature 1: what the best sampled chain "
        "has accepted)."
    )
    positions = min(len(comparison.best_by_position), len(one.acceptance_by_position))
    allowed, came = (
        _survived(comparison.best_by_position[:positions]),
        _survived(one.acceptance_by_position[:positions]),
    )
    if allowed > 0 and came / allowed < LOST:
        yield f"Only {came / allowed:.0%} of what these two distributions allow was accepted: something is lost on the way."
    if min(comparison.overlap, comparison.agreement) < HARDLY:
        yield (
            "The two models hardly agree. Check that the draft is meant for this target: the same tokenizer, the same chat "
            "template, weights that were loaded as a whole. If so, distil it: assisted train distill."
        )
    if comparison.cosine is not None:
        yield f"(Diagnostic, no predictor: the cosine of their last hidden states is {comparison.cosine:.2f} on average.)"


def _survived(by_position: Sequence[float]) -> float:
    """Tokens that a draft may expect to be accepted."""
    total, survival = 0.0, 1.0
    for share in by_position:
        survival *= share
        total += survival
    return total


def _what_if(one: Diagnosis) -> str:
    return (
        f"With a draft twice as fast it would be {one.if_twice_as_fast:.2f}, with one that is wrong half as often "
        f"{one.if_half_as_wrong:.2f}, if further tokens of a pass cost half {one.if_columns_cost_half:.2f}."
    )


def _hint(best: Diagnosis) -> str:
    """What would help the most."""
    ways = {
        "draft": "the time it takes to draft: try a smaller or a quantized one (draft_quantization='nf4', where its kernels "
        "are fast), fewer layers, or heads (assisted train eagle)",
        "verify": "the target's pass, which takes longer the more tokens it reads: keep drafts short and leave trees out; a "
        "GPU, or a larger target, makes further tokens cheaper",
        "acceptance": "what it gets wrong: a draft nearer to this target on such text gets more right (assisted train distill "
        "with text of your own, or a larger draft)",
    }
    if best.proposed < 0.9:
        ways["acceptance"] = (
            f"what it gets wrong, and that it proposes something in {best.proposed:.0%} of the rounds only: text that does not "
            "repeat needs a model that drafts, or both, draft=['suffix', ...]"
        )
    first, *others = bottlenecks(best)
    hint = f"What holds {best.draft} back is {ways[first]}."
    return hint + "".join(f" Nearly as much: {ways[other]}." for other in others)


def _measured(one: Diagnosis) -> float:
    return max(check.speedup.ratio for check in one.checks)


def _times(interval: Interval) -> str:
    if interval.high - interval.low < 0.005:
        return f"{interval.ratio:.2f} times"
    return f"{interval.ratio:.2f} times ({interval.low:.2f} to {interval.high:.2f})"


def _table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _item(text: str) -> str:
    return fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e8 else f"{number / 1e6:.2g} million"


def _bytes(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
