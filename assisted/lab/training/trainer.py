"""One trainer for every method: seeded, resumable, measuring held-out acceptance as it goes.

A step is a function of (seed, step) and the state alone, so an interrupted run resumes to the same weights (on a CPU, bit
for bit). Knows steps, optimizers, checkpoints and metrics; the method knows what is trained and how it is scored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from tqdm.auto import tqdm

from ...core.host import free_memory, now
from ...extras import install
from ...methods.shared.training.data import Text, Windows, pack
from ...methods.shared.training.losses import Agreement
from ...methods.shared.training.method import Method, Plan, fitting_batch, needs
from . import checkpoints

__all__ = ["train"]

METRICS, PLOT = "training.jsonl", "training.png"


class _Scored(nn.Module):
    """The student, with the loss as its forward, so that data-parallel wrappers see every parameter used."""

    def __init__(self, method: Method):
        super().__init__()
        self.student = method.student
        self._loss = [method.loss]  # in a list, because the target must not become a submodule

    def forward(self, ids: Tensor, step: int) -> Tensor:
        return self._loss[0](ids, step)


def train(
    method: Method,
    text: Text,
    plan: Plan,
    out: str | Path,
    stop_after: int | None = None,
    say: Callable[[str], None] = print,
    notes: dict[str, Any] | None = None,
    store: torch.dtype | None = None,
    batches: Callable[[int], Tensor] | None = None,
) -> Path:
    """Train a method into a folder, from the beginning or from the checkpoint there.

    On a machine with one or several accelerators, start it with `accelerate launch`; only the CPU is tested.

    Args:
        method: what is trained; its target is never changed.
        text: what it is trained and measured on.
        plan: how long and how fast.
        out: gets the result, training.json, training.jsonl and training.png, and checkpoint.pt until the end.
        stop_after: stop, with a checkpoint, after this many steps in all.
        say: called with each line about the run.
        notes: more to write into training.json, such as the command.
        store: dtype of the files; None keeps that of the parameters. The last held-out acceptance is that of the files.
        batches: the ids of each step, [batch, T] int64; None cuts the text into windows by the plan.

    Returns `out`.

    Ctrl-C finishes the step, writes a checkpoint and raises KeyboardInterrupt; a second one ends the run at once.

    Raises ValueError for a folder that holds another run, and for a text that is too short.
    """
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    processes, main = accelerator.num_processes, accelerator.is_main_process
    folder = Path(out)
    checkpoint, result = folder / "checkpoint.pt", folder / "training.json"
    if not plan.batch:
        before = json.loads(result.read_text()) if result.exists() else checkpoints.settings_in(checkpoint)
        free = free_memory()
        if accelerator.device.type == "cuda":
            free = torch.cuda.mem_get_info(accelerator.device)[0]
        batch = before.get("batch") or fitting_batch(method, plan.context, free, processes)
        plan = replace(plan, batch=batch)
    if plan.batch % processes:
        raise ValueError(f"batch: {plan.batch} sequences cannot be divided among {processes} processes")
    tell = say if main else lambda line: None
    folder.mkdir(parents=True, exist_ok=True)
    batches = batches or Windows(text.training, plan.context, plan.batch, plan.seed).__getitem__
    held_out = pack(text.held_out, plan.context, plan.evaluate_rows)
    count = sum(p.numel() for p in method.trained())
    tell(
        f"{method.name}: {count:,} parameters to train, {len(text.training):,} tokens of text, {plan.batch} sequences per step"
    )
    tell(str(needs(method, plan)))

    for module in method.frozen:
        module.to(accelerator.device)
    scored = accelerator.prepare(_Scored(method))
    optimizers = _optimizers(method, plan)
    digest = hashlib.sha256(text.training.tobytes() + text.held_out.tobytes()).hexdigest()[:16]
    about = {"method": method.name, **method.settings(), "text": digest, **asdict(plan)}
    about = json.loads(json.dumps(about))  # as it is read back
    defaults = {field.name: field.default for field in fields(method.about)}
    if result.exists() and not checkpoint.exists():
        checkpoints.require_same(json.loads(result.read_text()), about, f"the result in {folder}", defaults)
        tell(f"{folder} already holds the result")
        return folder
    first = checkpoints.resume(checkpoint, method.student, optimizers, about, defaults)
    last = plan.steps if stop_after is None else min(stop_after, plan.steps)
    shown = ""
    with torch.random.fork_rng(), _metrics(folder / METRICS, first, main) as write, _interrupts() as interrupted:
        bar = tqdm(total=plan.steps, initial=first, desc=method.name, unit="step", disable=not main)
        for step in range(first, last):
            began = now()
            if step % plan.evaluations == 0:
                found = _measure(method, plan, held_out.to(accelerator.device))
                write(step, **found)
                shown = " ".join(f"{share:.0%}" for share in found["greedy"])
            measured = now()
            ids = batches(step)[accelerator.process_index :: processes].to(accelerator.device)
            loss = _step(accelerator, scored, method, plan, optimizers, ids, step)
            write(step, loss=loss)
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", held_out=shown, refresh=False)
            if step == first:
                bar.clear()
                tell(_estimate(plan, first, measured - began, now() - measured))
            stopped = interrupted()
            if main and ((step + 1) % plan.checkpoint_every == 0 or step + 1 == last or stopped):
                checkpoints.save(checkpoint, method.student, optimizers, step + 1, about)
            if stopped:
                bar.close()
                tell(f"stopped after step {step + 1} of {plan.steps}; the same command goes on from {checkpoint}")
                raise KeyboardInterrupt
        if last == plan.steps:
            if store is not None:
                with torch.no_grad():
                    for parameter in method.student.parameters():  # which keep their own dtype
                        parameter.copy_(parameter.to(store))
            found = _measure(method, plan, held_out.to(accelerator.device))
            write(plan.steps, **found)
            bars = zip(found["greedy"], found["error"], strict=True)
            shown = ", ".join(f"{share:.0%}" + ("" if half is None else f" ± {half:.0%}") for share, half in bars)
            tell(f"held out, top-1 token right by {method.axis}: {shown}")
        bar.close()
    if last == plan.steps and main:
        method.student.eval()
        if store is not None:
            method.student.to(store)
        method.save(folder)
        result.write_text(json.dumps({**about, **(notes or {})}, indent=2) + "\n")
        tell(draw(folder / METRICS, folder / PLOT, f"{method.name} on {text.source}", method.axis, method.positions))
        checkpoint.unlink(missing_ok=True)
    return folder


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C is only noted, since a step that is cut off would leave weights of no step at all. Gives a
    function that tells whether there was one. Signals are the main thread's: in another one, nothing changes."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def _estimate(plan: Plan, first: int, measuring: float, step: float) -> str:
    """How long a run takes by its first step, which also warms up. measuring, step: seconds."""
    steps = plan.steps - first
    times = -(-steps // plan.evaluations) + 1
    minutes = (steps * step + times * measuring) / 60
    return (
        f"the first step took {step:.1f} s: {steps} steps and {times} measurements of {measuring:.1f} s take about "
        f"{minutes:.0f} min at this rate"
    )


def _step(
    accelerator: Accelerator,
    scored: nn.Module,
    method: Method,
    plan: Plan,
    optimizers: list[torch.optim.Optimizer],
    ids: Tensor,
    step: int,
) -> float:
    """One step of the optimizers. Returns the loss."""
    torch.manual_seed(plan.seed * 1_000_003 + step)
    method.student.train()
    with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=plan.bfloat16):
        loss = scored(ids, step)
    accelerator.backward(loss)
    torch.nn.utils.clip_grad_norm_(method.trained(), plan.clip)
    value = loss.item()  # waits for an accelerator, which should have the backward pass queued by now
    if not math.isfinite(value):
        raise ValueError(f"lr: the loss is {value} at step {step}; a lower rate than {plan.lr} may help")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * plan.rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return value


@torch.no_grad()
def _measure(method: Method, plan: Plan, held_out: Tensor) -> dict[str, Any]:
    """Acceptance on held-out text by position, and the error bars of both kinds, ready for the metrics file."""
    method.student.eval()
    eager = torch.compiler.set_stance("force_eager")  # layers compiled for training would be compiled again
    with eager, torch.autocast(held_out.device.type, dtype=torch.bfloat16, enabled=plan.bfloat16):
        seen: list[list[Agreement]] = [method.acceptance(row[None]) for row in held_out]
    found: dict[str, Any] = {}
    for name, error in (("greedy", "error"), ("sampled", "sampled_error")):
        each = [[getattr(one, name) for one in position] for position in zip(*seen, strict=True)]
        found[name] = [sum(shares) / len(shares) for shares in each]
        # half of the 95% interval of a mean over rows, which are independent; positions within a row are not
        found[error] = [1.96 * statistics.stdev(row) / math.sqrt(len(row)) if len(row) > 1 else None for row in each]
    return found


def _optimizers(method: Method, plan: Plan) -> list[torch.optim.Optimizer]:
    matrices = method.matrices() if plan.optimizer == "muon" else []
    chosen = {id(p) for p in matrices}
    others = [p for p in method.trained() if id(p) not in chosen]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": plan.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if plan.optimizer == "muon" and not matrices:
        raise ValueError(f"optimizer: 'muon' trains matrices of layers, and {method.name} has none; use 'adamw'")
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=plan.matrix_lr, momentum=0.95, weight_decay=plan.weight_decay))
    if others:
        optimizers.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=plan.lr, betas=(0.9, 0.95)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


@contextlib.contextmanager
def _metrics(path: Path, first: int, writes: bool) -> Iterator[Callable[..., None]]:
    """A function that writes a line of training.jsonl, at once. A resumed run repeats the lines from the step `first` on: they
    are removed. writes: False in all processes but one."""
    if not writes:
        yield lambda step, **values: None
        return
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("".join(line + "\n" for line in lines if _line_step(line) < first))
    with path.open("a", buffering=1) as file:
        yield lambda step, **values: print(json.dumps({"step": step, **values}), file=file)


def _line_step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:  # the last line of a run that was killed
        return math.inf


SMOOTHING = 50  # points of the loss curve, each an average over a stretch of steps


def draw(metrics: Path, picture: Path, title: str, axis: str, positions: Sequence[int]) -> str:
    """Draw training.jsonl into a file. Returns a line that names the file or the missing library."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: it needs matplotlib ({install('train')})"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    measured = [row for row in rows if "greedy" in row]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    size = max(1, len(losses) // SMOOTHING)
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    left.plot([group[-1][0] for group in groups], [sum(loss for _, loss in group) / len(group) for group in groups])
    left.set(xlabel="step", ylabel="loss", title=title)
    for index, number in enumerate(positions):
        steps = [row["step"] for row in measured]
        right.plot(steps, [row["greedy"][index] for row in measured], marker=".", label=f"{axis} {number}")
    right.set(xlabel="step", ylabel="accepted at temperature 0", title="held-out text, teacher-forced", ylim=(0, 1))
    right.legend()
    figure.savefig(picture, dpi=120)
    return f"plot: {picture}"
