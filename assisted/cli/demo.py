"""The output of `assisted demo`: a pair completes code that it was not trained on, then a table shows the cost."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from .. import zoo
from ..extras import install
from ..lab.bench import Bars, Prompt, Result, Row, Rules, brief, short_prompts
from ..lab.bench.clock import silent
from ..lab.grown import RECORD
from ..lengths.adaptive import Adaptive
from ..lengths.policies import Confidence
from ..loading.quantization import memory_bytes
from ..modeling import AssistedModelForCausalLM
from .watch import Pieces, Watch

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text as Styled
except ImportError as error:
    raise ImportError(f"the demo draws with rich: {install('demo')}, or use --json") from error

PACE = 0.1  # seconds that a draft stays visible, and then its rejected tokens
GROWN = "zoo:target with more weights: the same text, at a higher cost"
READ, DRAFTED, ACCEPTED, OWN, REJECTED = "dim", "italic yellow", "cyan", "bold", "red strike"


def show(pairs: Mapping[str, AssistedModelForCausalLM], prompts: int, rules: Rules, live_tokens: int = 48) -> Result:
    """Print the whole demo: one completion while it is generated, then the table.

    Args:
        pairs, prompts, rules: as for `bench.brief`. The completion is the first pair's.
        live_tokens: new tokens of the completion that is shown.

    Without a terminal, or with NO_COLOR set, everything is plain text.
    """
    console = _console()
    watched = next(iter(pairs.values()))
    _draw_pair(console, watched)
    _draw_live(console, watched, short_prompts(watched.tokenizer, 1)[0], live_tokens)
    if not console.is_terminal:
        console.print("Measuring ...")
    with Bars() as bars:
        result = brief(pairs, prompts, rules, bars if console.is_terminal else silent)
    _draw_result(console, result)
    return result


def _console() -> Console:
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM", "") in ("", "dumb"):
        return Console(force_terminal=False, color_system=None, highlight=False)
    return Console(highlight=False)


def _draw_pair(console: Console, model: AssistedModelForCausalLM) -> None:
    for role, part in (("target", model.target), ("draft ", model.drafter.model)):
        if part is None:
            continue
        mebibytes = memory_bytes(part) / 2**20
        layers = part.config.get_text_config(decoder=True).num_hidden_layers
        shipped = {zoo.folder(name): f"zoo:{name}" for name in zoo.NAMES}
        name = shipped.get(part.name_or_path, part.name_or_path)
        quantization = getattr(model.spec, "quantization", None) if role != "target" else None
        bits = f" in {quantization}" if isinstance(quantization, str) else ""
        console.print(f"{role}  {name}{bits}: {layers} layers, {mebibytes:.1f} MiB", style=READ)
        if hasattr(part.config, RECORD):
            console.print("        " + GROWN, style=READ)


def _draw_live(console: Console, model: AssistedModelForCausalLM, prompt: Prompt, new_tokens: int) -> None:
    """The prompt, and the completion while it is generated."""
    before, _, start = prompt.text.rpartition("\n")
    console.print(f"\n{prompt.source}, continued\n")
    console.print(Styled(before, READ), soft_wrap=True)
    watch = Watch()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:

            def draw(watch: Watch) -> None:
                lines = _styled(model.tokenizer, start, watch).wrap(console, console.width)
                shown = lines[-max(1, console.height - 2) :]  # as many as the terminal has room for
                live.update(Styled("\n").join(shown), refresh=True)
                if watch.waiting or watch.rejected:
                    time.sleep(PACE)

            watch.draw = draw
            _watched_generate(model, watch, prompt, new_tokens)
        console.print(_styled(model.tokenizer, start, watch), soft_wrap=True)
        legend = (("prompt", READ), ("drafted", DRAFTED), ("accepted", ACCEPTED), ("rejected", REJECTED))
        named = [part for word in legend for part in (word, ", ")]
        console.print(Styled.assemble("\n", *named, ("the target's own", OWN), " (slowed down to be visible)"))
    else:
        _watched_generate(model, watch, prompt, new_tokens)
        console.print(Styled(_underlined(model.tokenizer, start, watch)), soft_wrap=True)
        console.print("\n~ drafted and accepted; all other tokens are the target's own")
    report = model.report
    assert report is not None
    console.print(
        f"{sum(watch.drafted)} of {len(watch.tokens)} tokens were drafted and accepted; {report.target_passes} forward passes "
        f"of the target after the prompt\n"
    )


def _watched_generate(model: AssistedModelForCausalLM, watch: Watch, prompt: Prompt, new_tokens: int) -> None:
    ids = prompt.ids.to(model.target.device)
    # drawing takes time, which an adaptive length would count as time of the draft
    length = Confidence() if isinstance(model.draft_length, Adaptive) else model.draft_length
    model.watch = watch.see
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=watch,
            draft_length=length,
        )
    finally:
        model.watch = None


def _styled(tokenizer: Any, start: str, watch: Watch) -> Styled:
    """The last line of the prompt, the committed tokens, and the drafted or rejected ones."""
    styles = [ACCEPTED if drafted else OWN for drafted in watch.drafted]
    styles += [DRAFTED] * len(watch.waiting) + [REJECTED] * len(watch.rejected)
    pieces = Pieces(tokenizer)
    tokens = [*watch.tokens, *watch.waiting, *watch.rejected]
    return Styled.assemble((start, READ), *zip(map(pieces.add, tokens), styles, strict=True))


def _underlined(tokenizer: Any, start: str, watch: Watch) -> str:
    """As `_styled`, without styles: `~` under accepted draft tokens."""
    pieces, text, marks = Pieces(tokenizer), start, " " * len(start)
    for piece, drafted in zip(map(pieces.add, watch.tokens), watch.drafted, strict=True):
        text += piece
        marks += "".join("\n" if c == "\n" else "~" if drafted and not c.isspace() else " " for c in piece)
    both = zip(text.split("\n"), marks.split("\n"), strict=True)
    return "\n".join(line if not mark.strip() else f"{line}\n{mark.rstrip()}" for line, mark in both)


def _draw_result(console: Console, result: Result) -> None:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("same\ntokens", "tokens\n/pass", "drafts\nkept", "ms per\ntoken", "\nspeedup", "over no\ndraft"):
        table.add_column(name, justify="right", no_wrap=True)
    point = result.points[0]
    for row in point.rows:
        if row.error is None:
            table.add_row(*_cells(row))
    console.print(table)
    console.print()
    for row in point.rows:
        if row.error is not None:
            console.print(f"{row.name} failed: {row.error}", style=REJECTED)
    ran = next(row for row in point.rows if row.name == point.baseline)
    settings, families = len(point.heat), {row.family for row in point.heat}
    how = "with the same model" if "transformers assisted" in families else "by prompt lookup"
    rules, machine = result.rules, result.machine
    count = sum(map(len, result.prompts.values()))
    useless = [row.name for row in point.rows if row.by_drafting is not None and row.by_drafting.high <= 1]
    if useless:
        console.print(
            f"Drafting adds nothing on this machine: {'; '.join(useless)}. `assisted doctor` says why and what to try.",
            style=REJECTED,
        )
    for line in (
        f"{count} prompts x {rules.new_tokens} new tokens, held-out code, temperature {rules.temperature:g}, "
        f"{machine['dtype']}, {machine['device']}, {machine['threads']} threads.",
        f"Timed runs, in turns: {len(ran.seconds)}. Speedup over plain: median [95% interval]. `assisted bench` measures more.",
        "Over no draft: what drafting adds to this package's loop and kernels, which are the rest of the speedup.",
        "Plain is transformers' `generate`, not compiled. Passes are forward passes of the target, the prompts' included.",
        f"transformers drafts {how}, with the fastest of {settings} settings.",
        f"{ran.repeated_4grams:.0%} of the generated 4-grams repeat an earlier one; repetition makes drafting look better.",
    ):
        console.print(line, style=READ, markup=False)


def _cells(row: Row) -> list[str]:
    rate = row.acceptance_rate
    return [
        row.family.removesuffix(" assisted") if row.family.startswith(("plain", "transformers")) else row.name,
        "-"
        if row.family == "plain" or row.same is None
        else "yes"
        if row.same == row.rows
        else f"{row.same} of {row.rows}",
        f"{row.tokens_per_pass:.2f}",
        "-" if rate is None else f"{rate:.0%}",
        f"{row.milliseconds_per_token:.2f}",
        "1.00" if row.family == "plain" else str(row.speedup).replace("[", "\\["),
        "" if row.by_drafting is None else f"{row.by_drafting.ratio:.2f}",
    ]
