"""What is measured of the models themselves: times of a target's forward passes by number of tokens, the share that reading
weights from memory takes, and how close a draft's distribution is to its target's, on text that the target wrote: the limit of
its acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from transformers import PreTrainedModel

from ...core.acceptance import top1
from ...core.host import now, timed
from ...engine.prepared import CallSettings
from ...engine.recurrent import slots_for, target_runner
from ...engine.traits import Traits
from ...engine.verifiable import masks_of
from ...fast.fused import prepare
from ...fast.graphs import Graphs
from ...loading.quantization import memory_bytes

_COPIES = 8


@dataclass(frozen=True)
class PassTimes:
    """Times of forward passes after a context of one length, batch 1."""

    context: int  # tokens that were read before
    onednn: bool | None  # whether oneDNN computed products, if a CPU has the choice; else None
    seconds: dict[int, float]  # medians by number of tokens in a pass (its columns), with the argmax of the logits


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second that a copy reads and writes: the slowest and the fastest of several copies."""

    low: float
    high: float


@dataclass(frozen=True)
class Memory:
    """A forward pass over one token, relative to the time that reading its weights from memory takes."""

    weight_bytes: int | None  # that a pass reads; None for a mixture of experts, where that depends on the tokens
    # of a copy. Reading alone is often faster, by up to a half; shares are uncertain by as much.
    bandwidth: Bandwidth
    seconds: float  # of a pass over one token

    @property
    def share(self) -> tuple[float, float] | None:
        """The share of the memory's speed that a pass reaches, by the fastest and the slowest copy. Above 1, caches help."""
        if self.weight_bytes is None:
            return None
        rate = self.weight_bytes / self.seconds
        return rate / self.bandwidth.high, rate / self.bandwidth.low


@torch.inference_mode()
def pass_times(
    target: PreTrainedModel,
    ids: torch.Tensor,
    context: int,
    columns: Sequence[int],
    repeats: int = 9,
    seconds: float = 10.0,
    onednn: bool | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> PassTimes:
    """Time forward passes of each width in turns, after one or more untimed turns.

    Args:
        target: a causal LM, run as `generate` of this package runs it.
        ids: [S] int64, text to read; it is repeated if it is too short.
        context: tokens read before.
        columns: the widths, ascending.
        repeats: timed turns, at most; after `seconds` no more begin, but at least one runs.
        onednn: switch it on or off meanwhile; None leaves it as it is.
        progress: called after each pass with the share that is done.
    """
    settings, widest = CallSettings("auto"), columns[-1]
    masks = masks_of(target, settings.trust_in(target))
    # recurrent states cannot undo a pass over one token: each turn leaves one more
    cache = slots_for(target, None, 1, context + widest + repeats + 3, masks)
    run = Graphs().serve(target_runner(prepare(target, settings), cache, masks), target, settings)
    uncounted = 1 if target.device.type == "cpu" else 3  # the first turns capture passes and compare them
    text = ids.to(target.device).repeat(-(-(context + widest) // len(ids)))[None]
    found: dict[int, list[float]] = {width: [] for width in columns}
    with nullcontext() if onednn is None else torch.backends.mkldnn.flags(enabled=onednn):
        run.prefill(text[:, :context], None)
        deadline = now() + seconds
        for repeat in range(repeats + uncounted):
            if repeat > uncounted and now() > deadline:
                break
            for number, width in enumerate(columns):
                started = now()
                top1(run(text[:, context : context + width])).tolist()  # waits for the device
                took = now() - started
                run.commit([1 if run.in_lockstep and width == 1 else 0])
                if repeat >= uncounted:
                    found[width].append(took)
                progress((repeat + (number + 1) / len(columns)) / (repeats + uncounted))
    settings.over = True
    return PassTimes(context, onednn, {width: median(taken) for width, taken in found.items()})


def bandwidth(device: torch.device) -> Bandwidth:
    """Bandwidth of the memory, by copies that are larger than caches; on a CPU, with as many threads as torch uses."""
    size = 2**27 if device.type == "cpu" else 2**29
    source = torch.ones(size, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    _, *seconds = [timed(lambda: copy.copy_(source), device)[1] for _ in range(_COPIES + 1)]
    return Bandwidth(2 * size / max(seconds), 2 * size / min(seconds))


def memory(target: PreTrainedModel, seconds: float) -> Memory:
    """The memory of a target's device. seconds: of a forward pass over one token."""
    read = None
    if Traits.of(target).experts is None:
        words, output = target.get_input_embeddings().weight, target.get_output_embeddings()
        read = memory_bytes(target) - (0 if output is not None and output.weight is words else words.nbytes)
    return Memory(read, bandwidth(target.device), seconds)


@dataclass(frozen=True)
class Written:
    """A text that was generated with drafts."""

    ids: torch.Tensor  # [P + N] int64, prompt and new tokens
    prompt: int  # P
    starts: tuple[int, ...]  # the indices of the new tokens with which a draft began, from 0


@dataclass(frozen=True)
class Comparison:
    """Two distributions side by side."""

    # 1 minus the total variation of the two distributions at temperature 1, mean over the text: the highest possible
    # acceptance of a sampled token (2211.17192)
    overlap: float
    agreement: float  # share of the text where both have the same top-1 token: the acceptance of greedy drafts
    # highest possible acceptance of the first, second, ... drafted token, given that those before it were accepted: the
    # mean of 1 minus the total variation at the temperature of the text, over the recorded drafts.
    best_by_position: tuple[float, ...]
    # mean cosine of the last hidden states, None if their sizes differ. A diagnostic, no predictor: two models that were
    # trained separately may produce the same output from states that have nothing in common.
    cosine: float | None
    tokens: int  # number of compared tokens


@torch.inference_mode()
def compare(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    texts: Sequence[Written],
    temperature: float,
    longest: int,
) -> Comparison:
    """Run both models over the texts.

    Args:
        target, draft: models with the same vocabulary.
        texts: generated by the target, with or without drafts.
        temperature: of the texts; 0 is greedy.
        longest: positions of a draft to compare.
    """
    overlaps, agreements, cosines = [], [], []
    survived, begun = torch.zeros(longest + 1), torch.zeros(longest + 1)  # by position: drafts that reached it
    for text in texts:
        ids = text.ids.to(target.device)[None]
        logits, states = _read(target, ids, text.prompt)
        guesses, guessed_from = _read(draft, ids.to(draft.device), text.prompt)
        guesses = guesses.to(logits.device)
        size = min(logits.shape[-1], guesses.shape[-1])  # vocabularies may be padded
        p, q = logits[:, :size], guesses[:, :size]
        overlaps.append(_overlap(p.softmax(-1), q.softmax(-1)))
        agreements.append((p.argmax(-1) == q.argmax(-1)).float())
        if states.shape == guessed_from.shape:
            cosines.append(torch.cosine_similarity(states.float(), guessed_from.to(states.device).float(), dim=-1))
        p, q = _probabilities(p, temperature), _probabilities(q, temperature)
        words = ids[0, text.prompt :, None]
        passing = (q.gather(1, words) / p.gather(1, words).clamp(min=1e-30)).clamp(max=1)[:, 0].cpu()
        best = _overlap(p, q).cpu()
        for start in text.starts:
            # for text from the target's distribution, the product of min(1, q/p) is the chance that a draft gets this far
            reach = passing[start : start + longest - 1].cumprod(0)
            reach = torch.cat([torch.ones(1), reach])[: len(best) - start]
            survived[1 : len(reach) + 1] += reach * best[start : start + len(reach)]
            begun[1 : len(reach) + 1] += 1
    shares = torch.where(begun > 0, survived / begun.clamp(min=1), torch.zeros(()))
    shares[0] = 1
    by_position = [min(1.0, (after / before).item()) for before, after in pairwise(shares) if before > 1e-3]
    return Comparison(
        overlap=torch.cat(overlaps).mean().item(),
        agreement=torch.cat(agreements).mean().item(),
        best_by_position=tuple(by_position),
        cosine=torch.cat(cosines).mean().item() if cosines else None,
        tokens=sum(map(len, overlaps)),
    )


def _read(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits before every new token, [N, V] float32, and the last hidden states they come from, [N, D]."""
    out = model(ids[:, :-1], use_cache=False, output_hidden_states=True)
    return out.logits[0, prompt - 1 :].float(), out.hidden_states[-1][0, prompt - 1 :]


def _probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[N, V] logits -> [N, V] probabilities; at temperature 0 the top-1 token has all of it."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def _overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """1 minus the total variation, [N, V] twice -> [N]."""
    return torch.minimum(p, q).sum(-1)
