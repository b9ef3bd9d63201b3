"""`plan`: what a pair takes and how fast it should be, which variants fit, and the line that loads the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ... import zoo
from ...loading.backends import find, placed
from ...methods import DraftModel, parse
from ...methods.shared.base import Spec
from .devices import Device, bytes_of, card, here
from .shapes import Shapes
from .sizes import Part, Speed, Use, is_unpacked, parts, predict, still_quantized, weight_bytes

GB = 10**9
_UNPACKED = "its weights ({}) are unpacked on this device and take the memory of ordinary ones"
ALIKE = 1.05  # the most memory over the least, of variants that one line describes if all fit
_LOWER = {"cuda": ("int8", "nf4"), "cpu": ("int8", "int4")}
"""What a target is quantized to if it does not fit; its output is then the quantized model's."""
_TITLES = {
    **{None: "as stored", "int8": "8 bits", "nf4": "4 bits (nf4)", "int4": "4 bits", "int4-int8": "4 bits"},
}


@dataclass(frozen=True)
class Candidate:
    """One way to load the pair."""

    quantization: str | None  # of the target; None keeps its weights
    draft: str  # in words
    draft_quantization: str | None  # of a draft model
    parts: tuple[Part, ...]  # of the memory
    fits: bool  # in the device's memory
    offloaded: int  # bytes of the target's weights that stay in main memory, so that the rest fits; 0 if all fits
    speed: Speed  # expected

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """What was asked, what fits, and what to choose.

    Args:
        target, draft: as the caller gave them.
        device: where it should run.
        use: context, rows and so on.
        candidates: as asked first, then smaller ones; at least one.
        chosen: the index of the best candidate that fits; of the first if none does, with a part of it offloaded.
        download: bytes of the target's files; None if they are here, or not known.
        notes: what the figures leave out.
        draft_window: of the draft that was asked for.
    """

    target: str
    draft: str
    device: Device
    use: Use
    candidates: tuple[Candidate, ...]
    chosen: int
    download: int | None
    notes: tuple[str, ...] = ()
    draft_window: int | None = None

    @property
    def best(self) -> Candidate:
        """What to choose."""
        return self.candidates[self.chosen]

    @property
    def line(self) -> str:
        """The Python that loads what to choose."""
        best, cuda = self.best, self.device.kind == "cuda"
        given = [repr(self.target)]
        if best.draft != "suffix":
            given.append(f"draft={best.draft!r}")
            if self.draft_window is not None:
                given.append(f"draft_window={self.draft_window}")
        if best.draft_quantization:
            given.append(f"draft_quantization={best.draft_quantization!r}")
        given.append(f"dtype=torch.{str(self.use.dtype).removeprefix('torch.')}")
        if self._config is not None:
            given.append(f"quantization_config={self._config[0]}")
        if best.offloaded:
            room = sum(part.bytes for part in best.parts if part.name == "target: weights") - best.offloaded
            given.append(f'device_map="auto", max_memory={{0: "{max(room, 0) / 2**30:.1f}GiB", "cpu": "1000GiB"}}')
        elif cuda:
            given.append('device_map="cuda"')
        return f"AssistedModelForCausalLM.from_pretrained({', '.join(given)})"

    @property
    def imports(self) -> tuple[str, ...]:
        """What `line` needs, a statement each."""
        found = ["from assisted import AssistedModelForCausalLM", *([] if self._config is None else self._config[1:])]
        return ("import torch", *sorted(found, key=lambda statement: statement.startswith("from assisted")))

    @property
    def _config(self) -> tuple[str, str] | None:
        """The Python that makes the target's quantization config, and its import; None for a target that is not quantized."""
        if self.best.quantization is None:
            return None
        name = placed(self.best.quantization, self.device.kind)
        backend, chosen = find(name)
        code = chosen.code.format(dtype=self.use.dtype) or f"resolve({name!r}, {self.use.dtype})"
        home = backend.configs if chosen.code else "assisted.loading.quantization"
        return code, f"from {home} import {code.partition('(')[0]}"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON. Bytes, seconds, tokens per second."""

        def told(one: Candidate) -> dict[str, Any]:
            fields = asdict(one)
            speed = fields.pop("speed")
            rates = {"plain_tokens_per_second": speed["plain"], "speedup": speed["times"]}
            return fields | {"bytes": one.bytes} | {name: [round(x, 2) for x in pair] for name, pair in rates.items()}

        return {
            "target": self.target,
            "draft": self.draft,
            "device": {"name": self.device.name, "kind": self.device.kind, "memory": self.device.memory},
            "context": self.use.context,
            "batch": self.use.rows,
            "draft_window": self.draft_window,
            "dtype": str(self.use.dtype).removeprefix("torch."),
            "download": self.download,
            "candidates": [told(one) for one in self.candidates],
            "chosen": self.chosen,
            "imports": list(self.imports),
            "line": self.line,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        best = self.best
        download = "" if self.download is None else f", {_gb(self.download)} to download"
        rows = f", {self.use.rows} rows" if self.use.rows > 1 else ""
        sizes = [one.bytes for one in self.candidates]
        alike = len(sizes) > 1 and all(one.fits for one in self.candidates) and max(sizes) <= ALIKE * min(sizes)
        lines = [
            f"{self.target} with the draft {self.draft}, {self.use.context:,} tokens of context{rows}{download}",
            f"on {self.device.name}, {_gb(self.device.memory)} free",
            "",
            *_table(
                ("target", "draft", "memory", "fits", "tokens/s", "speedup"),
                [
                    (
                        _TITLES.get(one.quantization, str(one.quantization)),
                        one.draft + (f" in {one.draft_quantization}" if one.draft_quantization else ""),
                        _gb(one.bytes),
                        "yes" if one.fits else "no",
                        _range(one.speed.plain, 0),
                        _range(one.speed.times, 1),
                    )
                    for one in ([best] if alike else self.candidates)
                ],
                0 if alike else self.chosen,
            ),
            *(
                [
                    f"  Smaller drafts and fewer bits ({len(sizes) - 1} variants) save at most {_gb(max(sizes) - min(sizes))}."
                ]
                if alike
                else []
            ),
            "",
            "Memory of the chosen one" + (":" if best.fits else ", which does not fit:"),
            *(f"  {_gb(p.bytes):>9}  {p.name}{'' if p.counted else ' (estimated)'}" for p in best.parts if p.bytes),
            f"  {_gb(best.bytes):>9}  in all",
        ]
        if best.offloaded:
            lines += [
                "",
                f"{_gb(best.offloaded)} of the target's weights stay in main memory and cross the bus in every pass.",
            ]
        if best.quantization is not None:
            lines += ["", "A quantized target says what the quantized model says, with and without a draft."]
        lines += [
            "",
            *(f"  {statement}" for statement in self.imports),
            f"  model = {self.line}",
            "",
            "Tokens/s are without a draft. Speeds are computed from bandwidths and usual",
            "acceptance, not measured: `assisted doctor` measures them on your machine and",
            "your text.",
            *self.notes,
        ]
        return "\n".join(lines)


def plan(
    target: str | Shapes,
    draft: Any = None,
    *,
    memory: str | int | None = None,
    card_name: str | None = None,
    context: int = 8192,
    rows: int = 1,
    dtype: torch.dtype | None = None,
    quantization: str | None = None,
    draft_quantization: str | None = None,
    draft_window: int | None = None,
    device: str | None = None,
    drafted: int = 16,
    fast: bool = True,
    trust_remote_code: bool = False,
) -> Plan:
    """What fits, what to choose and what to expect, from configs and headers; no weights are read.

    Args:
        target: a Hub id, a folder, a `zoo:` name, a GGUF file, or its `Shapes`.
        draft: as `from_pretrained` takes it; None is a saved pair's own, otherwise "suffix". May also be
            the `Shapes` of a draft model.
        memory: of the device, such as "12GB"; None takes the card's, or what is free here.
        card_name: a name in `CARDS`.
        context: tokens of prompt and answer.
        rows: sequences at once.
        dtype: in which the models compute; None takes bfloat16 on a card and the checkpoint's on a CPU.
        quantization: of the target, a name such as "nf4"; None tries 8 and 4 bits if the checkpoint's weights do not fit.
        draft_quantization: the same for a draft model.
        draft_window: as for `from_pretrained`.
        device: "cuda" or "cpu"; None means a card if a card or memory is named, else this machine.
        drafted: tokens of the longest draft.
        fast: False for `fast="eager"`, which keeps no copies.
        trust_remote_code: run code that comes with a checkpoint to build its modules.

    Raises ValueError for bad sizes and names and for models without weights, OSError for unknown ids.
    """
    held = None if memory is None else bytes_of(memory)
    if card_name is not None or (held is not None and device != "cpu"):
        place = card(card_name, held)
    else:
        place = here(device)
        place = place if held is None else replace(place, memory=held)
    shapes = target if isinstance(target, Shapes) else Shapes.read(target, "target", trust_remote_code)
    half = torch.bfloat16 if place.kind == "cuda" else shapes.model.dtype
    use = Use(context, rows, drafted, dtype or half, place.kind, quantization, draft_quantization, fast, place.fp8)
    draft = shapes.draft if draft is None else draft
    their_draft = draft if isinstance(draft, Shapes) else None
    if their_draft is not None:
        spec: Spec = DraftModel(their_draft.name, draft_window=draft_window)
    else:
        spec = parse(draft, draft_quantization, draft_window)
        models = [getattr(one, "model", None) for one in spec.parts() if one.quantizes == "model"]
        path = next((model for model in models if isinstance(model, str)), None)
        their_draft = None if path is None else Shapes.read(path, "draft", trust_remote_code)
    wanted, kept = _named(draft), still_quantized(shapes, use)
    if kept is not None and any(one.quantizes == "target" for one in spec.parts()):
        raise ValueError(
            f"draft: {wanted!r} is a quantized copy of the target, and {shapes.name!r} is quantized already ({kept}); choose "
            "another draft, or plan the original"
        )
    found = tuple(
        _candidate(shapes, one, name, replace(use, quantization=how, draft_quantization=low), their_draft, place)
        for how, one, name, low in _variants(shapes, spec, wanted, use)
    )
    fitting = [index for index, one in enumerate(found) if one.fits]
    models_of = [one for one in (shapes, their_draft) if one is not None]
    notes = tuple(f"{one.name}: {one.note}." for one in models_of if one.note)
    notes += tuple(f"{one.name}: {_UNPACKED.format(one.quantized)}." for one in models_of if is_unpacked(one, use))
    if draft_window is not None:
        notes += ("Before the window applies, the draft reads the whole prompt, which takes more for a moment.",)
    download = None if Path(zoo.resolve(shapes.name)).exists() else shapes.stored
    return Plan(shapes.name, wanted, place, use, found, fitting[0] if fitting else 0, download, notes, draft_window)


def _variants(shapes: Shapes, spec: Spec, wanted: str, use: Use) -> list[tuple[str | None, Spec, str, str | None]]:
    """(quantization of the target, spec, its name, quantization of a draft model): as asked first, then what takes less."""
    drafts: list[tuple[Spec, str, str | None]] = [(spec, wanted, use.draft_quantization)]
    quantized = {one.quantizes for one in spec.parts()}
    if "model" in quantized and use.draft_quantization is None:
        drafts.append((spec, wanted, "nf4" if use.device == "cuda" else "int8"))
    if wanted != "suffix":
        drafts.append((parse("suffix"), "suffix", None))
    levels: Sequence[str | None] = [use.quantization]
    if use.quantization is None and shapes.quantized is None:
        levels = [None, *_LOWER[use.device]]
    found = []
    for level in levels:
        again = "target" in quantized and level is not None  # a copy of quantized weights cannot be quantized
        found += [(level, one, name, low) for one, name, low in drafts if not (again and name == wanted)]
    return found


def _named(draft: Any) -> str:
    """A draft as a string that `from_pretrained` takes, if there is one."""
    if isinstance(draft, Spec) and draft.parts()[0] is not draft:
        draft = draft.parts()
    if isinstance(draft, (list, tuple)):
        return "+".join(map(_named, draft))
    if isinstance(draft, DraftModel) and isinstance(draft.model, str):
        return draft.model
    if isinstance(draft, Spec):
        path = getattr(draft, "path", None)
        return f"{draft.name}:{path}" if isinstance(path, str) else draft.name
    return "suffix" if draft is None else draft.name if isinstance(draft, Shapes) else str(draft)


def _candidate(shapes: Shapes, spec: Spec, name: str, use: Use, draft: Shapes | None, place: Device) -> Candidate:
    how = None if use.quantization is None else placed(use.quantization, use.device)
    found = parts(shapes, spec, replace(use, quantization=how), draft, place.memory)
    total = sum(part.bytes for part in found)
    weights = weight_bytes(shapes, use, how, use.dtype or shapes.model.dtype)
    of_draft = [part for part in found if part.name.startswith("draft: ")]
    drafts = sum(part.bytes for part in of_draft if not part.name.endswith(("values", "states")))
    states = sum(part.bytes for part in found if part.name == "target: keys and values") // (2 * use.rows)
    offloaded = max(0, min(weights, total - place.memory)) if place.kind == "cuda" else 0
    copied = any(one.quantizes == "target" for one in spec.parts())
    layers = draft.layers if draft is not None and drafts else shapes.layers if copied else bool(drafts)
    speed = predict(shapes, spec, weights, drafts, states, place.bandwidth, offloaded, place.bus, layers)
    return Candidate(
        use.quantization, name, use.draft_quantization, tuple(found), total <= place.memory, offloaded, speed
    )


def _gb(size: int) -> str:
    return f"{size / GB:.2f} GB" if size >= 0.1 * GB else f"{size / 10**6:.1f} MB"


def _range(values: tuple[float, float], digits: int) -> str:
    low, high = (f"{value:.{digits if value >= 10 or digits else 1}f}" for value in values)
    return low if low == high else f"{low} to {high}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], marked: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return [("> " if number == marked else "  ") + line for number, line in enumerate(lines, -1)]
