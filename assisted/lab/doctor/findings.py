"""The report of `assisted doctor`: tables, what they mean, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul
from textwrap import fill

from ..bench.statistics import Interval
from ..bench.table import aligned
from .diagnosis import Check, Diagnosis, Examination
from .passes import Comparison

WIDTH = 79
WORTHWHILE = 1.03  # the least speedup for which drafting is recommended
NEARLY_FREE = 1.25  # the cost of a pass over five tokens, in passes over one
HARDLY = 0.35  # overlap, or agreement, of two models that hardly agree
LOST = 0.85  # accepted tokens as a share of those that the two distributions allow
NEARLY = 0.8  # share of the gain from removing the greatest bottleneck
LOOPS = 0.2  # share of repeated 4-grams from which the report warns
SHOWN = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
POSITIONS = 8


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
    if checked < WORTHWHILE * without:
        lines.append(
            f"Do not draft with {'any of these' if len(ran) > 1 else best.draft} here: {checked:.2f} times the speed of the "
            f"baseline was measured, {without:.2f} without drafts ({expected:.2f} expected for long texts). "
            "draft_length='adaptive', the default, detects that and disables drafting."
        )
    else:
        others = f", the best of these {len(ran)}" if len(ran) > 1 else ""
        lines.append(
            f"Take draft={best.draft!r}{others}. draft_length='adaptive', the default, finds a length by itself; a fixed one "
            f"would be {best.best}. Measured in short calls: {checked:.2f} times the speed of the baseline, "
            f"{checked / without:.2f} over no draft; expected for long texts: {_times(best.speedup)}, {_drafting(best)}."
        )
    lines.append(_hint(best))
    if examination.plain_way != "plain" and "oneDNN" in examination.plain_way:
        lines.append(
            "The baseline is faster with oneDNN switched off (torch.backends.mkldnn.flags(enabled=False)), which is slow for "
            "bfloat16 with one row. All speeds are relative to that baseline; float32 may be faster than both."
        )
    if examination.repeated_4grams > LOOPS:
        lines.append(
            f"{examination.repeated_4grams:.0%} of the generated 4-grams occurred before in their text: the target repeats "
            "itself, which makes every draft look better. Use text of your own, fewer new tokens or a temperature."
        )
    return lines


def bottlenecks(diagnosis: Diagnosis) -> list[str]:
    """Those of "draft", "acceptance" and "verify" that limit a draft: the one with the largest possible gain first."""
    gains = {
        "draft": diagnosis.if_twice_as_fast,
        "verify": diagnosis.if_columns_cost_half,
        "acceptance": diagnosis.if_half_as_wrong,
    }
    ranked = sorted(gains, key=gains.__getitem__, reverse=True)
    least = diagnosis.speedup.ratio + NEARLY * (gains[ranked[0]] - diagnosis.speedup.ratio)
    return [name for name in ranked if name == ranked[0] or gains[name] > least]


def _head(examination: Examination) -> str:
    machine = examination.machine
    where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    sampled = "greedy" if examination.temperature == 0 else f"temperature {examination.temperature:g}"
    lines = [
        f"{examination.target}: {_count(examination.parameters)} parameters, {machine['dtype']}, on {where}"
        + (f", {_plural(machine['threads'], 'thread')}" if machine["device"] == "cpu" else ""),
        f"text: {examination.text}, {_plural(examination.prompts, 'prompt')} of about {examination.prompt_tokens} tokens, "
        f"{examination.new_tokens} new tokens each, {sampled}, batch 1",
        f"autoregressive baseline: {1e3 * examination.plain_seconds:.3g} ms per token ({examination.plain_way}), 1.00 below",
    ]
    if examination.undrafted is not None:
        lines.append(f"this package without drafts: {_times(examination.undrafted)} that speed")
    if examination.way:
        lines.append(f"no shortcuts, {examination.way}")
    lines += [f"missing here: {one}" for one in examination.lacking]
    return "\n".join(fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def _passes(examination: Examination) -> str:
    columns = sorted(examination.passes[0].seconds)
    rows = [["tokens in a pass", *map(str, columns)]]
    for times in examination.passes:
        onednn = {True: ", oneDNN", False: ", no oneDNN", None: ""}[times.onednn]
        cells = [_milliseconds(times.seconds[n]) if n in times.seconds else "" for n in columns]
        rows.append([f"context {times.context}{onednn}", *cells])
    first = examination.passes[0].seconds
    ratio = min(first[n] for n in first if n >= 5) / first[1]
    text = f"A pass over 5 tokens or more takes at least {ratio:.2f} times as long as a pass over one. "
    if ratio < NEARLY_FREE:
        text += "Drafted tokens are nearly free to verify."
    else:
        text += "Verification is not free here: every drafted token costs some of its gain."
    return f"Forward passes of the target, milliseconds\n{_table(rows)}\n{fill(text, WIDTH)}"


def _memory(examination: Examination) -> str:
    memory = examination.memory
    rate = f"{memory.bandwidth.low / 1e9:.3g} to {memory.bandwidth.high / 1e9:.3g} GB/s"
    if memory.weight_bytes is None or memory.share is None:
        text = f"Memory: {rate}, measured by copying. The tokens decide how much of a mixture of experts a pass reads."
        return fill(text, WIDTH)
    low, high = memory.share
    bound = 1e3 * memory.weight_bytes / memory.bandwidth.high
    text = (
        f"A pass reads {_bytes(memory.weight_bytes)} of weights. The memory delivers {rate} here (measured by copying; reading "
        f"alone may be up to 1.5 times as fast). Reading thus takes {bound:.2f} ms, and a pass over one token reaches "
        f"{low:.0%} to {high:.0%} of the memory's speed. "
    )
    if high > 1:
        text += "More than 100% means that the weights fit into caches."
    elif low > 0.6:
        text += "Memory is the limit. Drafting gains the most then: more tokens in a pass need no more reading."
    elif low > 0.3:
        text += "Memory is part of the limit; the rest of the time goes into computing and launching operations."
    else:
        text += "Memory is not the limit: the time goes into computing, or into launching operations one by one. "
        if examination.machine["device"] != "cpu":
            text += "A compiled forward may gain more than a better draft."
        elif examination.machine["dtype"] != "float32":
            text += f"float32 may be faster than {examination.machine['dtype']} on this processor."
        else:
            text += "More threads may help."
    return fill(text, WIDTH)


def _diagnosis(one: Diagnosis, examination: Examination) -> Iterator[str]:
    yield f"Draft {one.draft}"
    if one.error is not None:
        yield _item(f"refused: {one.error}")
        return
    if one.warned:
        yield _item(f"warning: {one.warned}")
    if one.proposed == 0:
        yield _item("It proposed nothing in the whole recorded run. No speedup is to be expected from it here.")
        return
    what, passes = "A whole draft" if one.blocks else "A drafted token", one.draft_seconds / one.pass_seconds
    yield _item(f"{what} takes {_milliseconds(one.draft_seconds)} ms, {passes:.0%} of a forward pass over one token.")
    if one.proposed < 0.995:
        yield _item(f"It proposes something in {one.proposed:.0%} of the rounds.")
    if one.tree_columns is not None:
        yield _item(
            f"It proposes trees, with {one.tree_columns:.0f} nodes on average at its best depth. The figures for other depths "
            "are rough estimates."
        )
    rows = [["position", *(str(n + 1) for n in range(min(POSITIONS, len(one.acceptance_by_position))))]]
    rows.append(["accepted", *(f"{share:.0%}" for share in one.acceptance_by_position[:POSITIONS])])
    if one.comparison is not None:
        best = [f"{share:.0%}" for share in one.comparison.best_by_position[: len(rows[0]) - 1]]
        rows.append(["at best", *best, *[""] * (len(rows[0]) - 1 - len(best))])
    yield _table(rows, "    ")
    if one.comparison is not None:
        yield from map(_item, _on_comparison(one.comparison, one))
    if one.translated:
        yield _item(
            "It has another tokenizer, so tokens are translated. The distributions of the two models cannot be compared."
        )
    shown = [one.expected[length] for length in SHOWN if length < len(one.expected)]
    rows = [
        ["draft length", *(str(e.length) if e.length else "none" for e in shown)],
        ["tokens per pass", *(f"{e.tokens_per_pass:.2f}" for e in shown)],
        ["expected speed", *(f"{e.speedup.ratio:.2f}" for e in shown)],
    ]
    yield _table(rows, "    ")
    yield _item(
        f"Best draft length: {one.best}, {_times(one.speedup)} the speed of the baseline, {_drafting(one)}. It would be "
        f"{one.if_twice_as_fast:.2f} with a draft twice as fast, {one.if_half_as_wrong:.2f} with one that is wrong half as "
        f"often, {one.if_columns_cost_half:.2f} if further tokens in a pass cost half."
    )
    loop = examination.undrafted
    for check in one.checks:
        same = f", {check.same} of {check.texts} texts the same" if check.same is not None else ""
        over = "" if loop is None else f", {check.speedup.ratio / loop.ratio:.2f} over no draft"
        calls = _plural(check.texts, "call")
        measured = f"Measured, {check.way}: {_times(check.speedup)}{over}{same} ({calls}, prompts included)."
        if check.predicted is not None:
            measured += f" Predicted for these calls: {check.predicted:.2f}; {_verdict(check, check.predicted)}."
        yield _item(measured)


def _drafting(one: Diagnosis) -> str:
    """What drafting is expected to add to this package's loop and kernels, which are the rest of the speedup."""
    return f"{one.speedup.ratio / one.expected[0].speedup.ratio:.2f} over no draft"


def _verdict(check: Check, predicted: float) -> str:
    """Whether a prediction is in the interval of what was measured, or which part of the time differs most."""
    if check.speedup.low <= predicted <= check.speedup.high:
        return "as predicted"
    off = check.speedup.ratio / predicted - 1
    said = f"{abs(off):.0%} {'more' if off > 0 else 'less'} than predicted"
    ours, theirs = check.spent, check.foretold
    if ours is None or theirs is None:
        return said
    more = ours.passes / theirs.passes
    # seconds that each part adds to the prediction
    added = {"accepted tokens": (more - 1) * (theirs.draft + theirs.verify)}
    for part in ("verify", "draft", "other"):
        added[part] = getattr(ours, part) - more * getattr(theirs, part)
    most = (min if off > 0 else max)(added, key=added.__getitem__)
    if most == "accepted tokens":
        return f"{said}, mostly because {ours.passes} rounds were needed where {theirs.passes} were predicted"
    what = {"verify": "the target's pass", "draft": "drafting", "other": "the rest of a round"}[most]
    took, expected = (_milliseconds(getattr(one, most) / one.passes) for one in (ours, theirs))
    return f"{said}, mostly because {what} took {took} ms where {expected} were predicted"


def _on_comparison(comparison: Comparison, one: Diagnosis) -> Iterator[str]:
    yield (
        f"The two models have the same top-1 token at {comparison.agreement:.0%} of the text; their distributions overlap by "
        f"{comparison.overlap:.0%} (1 minus the total variation at temperature 1: the acceptance of the best sampled chain)."
    )
    positions = min(len(comparison.best_by_position), len(one.acceptance_by_position))
    # the expected number of accepted tokens of a draft, by the shares at each position
    allowed = sum(accumulate(comparison.best_by_position[:positions], mul))
    came = sum(accumulate(one.acceptance_by_position[:positions], mul))
    if allowed > 0 and came / allowed < LOST:
        yield f"Only {came / allowed:.0%} of the tokens that these distributions allow were accepted: something else is wrong."
    if min(comparison.overlap, comparison.agreement) < HARDLY:
        yield (
            "The two models hardly agree. Check that the draft is meant for this target: the same tokenizer, the same chat "
            "template, all weights loaded. If so, distill it: assisted train distill."
        )
    if comparison.cosine is not None:
        yield f"(Diagnostic, no predictor: the cosine of their last hidden states is {comparison.cosine:.2f} on average.)"


def _hint(best: Diagnosis) -> str:
    ways = {
        "draft": "the time it takes to draft: try a smaller or a quantized one (draft_quantization='nf4', if its kernels "
        "are fast), fewer layers, or heads (assisted train eagle)",
        "verify": "the target's forward pass, which takes longer with more tokens: keep drafts short and avoid trees; on a "
        "GPU, or with a larger target, further tokens are cheaper",
        "acceptance": "rejected tokens: a draft that is closer to this target on such text has fewer (assisted train distill "
        "with text of your own, or a larger draft)",
    }
    if best.proposed < 0.9:
        ways["acceptance"] = (
            f"rejected tokens, and by proposing something in only {best.proposed:.0%} of the rounds: text that does not repeat "
            "needs a model as draft, or both, draft=['suffix', ...]"
        )
    first, *others = bottlenecks(best)
    hint = f"{best.draft} is limited by {ways[first]}."
    return hint + "".join(f" Nearly as much: {ways[other]}." for other in others)


def _measured(one: Diagnosis) -> float:
    return max(check.speedup.ratio for check in one.checks)


def _times(interval: Interval) -> str:
    if interval.high - interval.low < 0.005:
        return f"{interval.ratio:.2f} times"
    return f"{interval.ratio:.2f} times ({interval.low:.2f} to {interval.high:.2f})"


def _table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    return "\n".join(indent + line if line else "" for line in aligned(rows, WIDTH - len(indent)))


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
