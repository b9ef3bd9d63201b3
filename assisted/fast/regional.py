"""A layer of the Llama family, compiled once for all layers, by torch's compiler in another process.

The compiled code is a function of the weights, so one layer's code runs every layer, of every model of this form. It is kept on
disk. Knows tensors, files and processes; `fused` decides which layers run this way, `exported` is the program that compiles.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import timeit
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.libraries import load_compiled
from . import native

BLOCK = 32
"""Outputs that lie together: the columns of a product that torch's compiler computes without another layout of weights."""
_COLUMNS = (1, 2, 4, 8, 16)  # at which both ways are timed
_TOP = 256  # slots of that trial
_LOSS = 100.0  # seconds of forward passes until compiling pays off: it takes some 30 of a processor, and saves a third
_LOSS_KEPT = 5.0  # the same where the code is on disk
LEAST = 2**20  # entries of a layer's weights; calling the code takes a noticeable part of smaller ones' time
_SECONDS = 900  # for the compiler, on a busy machine


@dataclass(frozen=True)
class Form:
    """All that a layer's code depends on, beside versions and processor.

    Args:
        hidden, inner, query_heads, key_heads, head_size, epsilon, scaling: of the layer.
        norms: whether queries and keys have norms.
        biases: of queries, keys and values together; of the attention's output; of gate and up together; of down.
        threads: that the code uses.
    """

    hidden: int
    inner: int
    query_heads: int
    key_heads: int
    head_size: int
    epsilon: float
    scaling: float
    norms: bool
    biases: tuple[bool, ...]
    threads: int

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the four products, in the order of `biases`."""
        heads, size = self.query_heads + 2 * self.key_heads, self.query_heads * self.head_size
        return (
            (heads * self.head_size, self.hidden),
            (self.hidden, size),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        )

    @property
    def entries(self) -> int:
        """Entries of the weights of a layer."""
        return sum(out * into for out, into in self.products)

    @property
    def key(self) -> str:
        """The name of its code, on this processor and with these versions."""
        own = [Path(__file__).with_name(name).read_bytes() for name in ("regional.py", "exported.py", "fused.py")]
        known = (json.dumps(asdict(self)), torch.__version__, platform.python_version(), _processor(), str(compiler()))
        return hashlib.sha256(b"".join(own) + "\n".join(known).encode()).hexdigest()[:24]


def blocked(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [out / BLOCK, in, BLOCK], padded with zeros."""
    weight = F.pad(weight.detach(), (0, 0, 0, -len(weight) % BLOCK))
    return weight.view(-1, BLOCK, weight.shape[1]).transpose(1, 2).contiguous()


class CompiledLayer:
    """A layer as compiled code, for one row.

    Args:
        run: the code; a list of `CompiledPass`'s tensors, slots and weights to [hidden states].
        weights: blocked ones of the four products, their biases, the norms' weights.
        threads: that the code uses.

    Attributes:
        columns: the numbers of columns of a forward pass for which it is faster.
    """

    def __init__(
        self, run: Callable[[list[torch.Tensor]], list[torch.Tensor]], weights: Sequence[torch.Tensor], threads: int
    ):
        self.run, self.weights, self.threads = run, weights, threads
        self.columns: frozenset[int] = frozenset(range(_COLUMNS[-1] + 1))

    def takes(self, hidden: torch.Tensor) -> bool:
        """Whether it runs a forward pass over these hidden states, [R, n, D]."""
        return len(hidden) == 1 and hidden.shape[1] in self.columns and self.threads == torch.get_num_threads()

    def __call__(
        self, hidden: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, around: CompiledPass
    ) -> torch.Tensor:
        """[1, n, hidden] -> [1, n, hidden]. keys, values: [1 or more, key heads, slots, head size], where the columns' own are
        written."""
        return self.run([hidden.contiguous(), *around.tensors, keys[:1], values[:1], *self.weights])[0]


class CompiledPass:
    """What the layers of a forward pass share.

    Args:
        mask: additive, [1, 1, any, top].
        cos, sin: of `Angles`, [1, n, 1, head size].
        places: [1, n], the slot that each column is written to.
    """

    def __init__(self, *given: torch.Tensor):
        self.tensors = [part.contiguous() for part in given]


class Layer(Protocol):
    """What is compiled: a `FusedLayer`."""

    form: Form | None

    def weights_of_form(self) -> list[torch.Tensor]: ...
    def compiled_as(self, code: CompiledLayer) -> Any: ...
    def trial(self, columns: int, top: int) -> Callable[[], list[torch.Tensor]]: ...


@dataclass
class Takeover:
    """The layers of a model on their way to compiled code. No call waits for it unless it asks to.

    Attributes:
        layers: the compiled ones; None until they are ready.
        reason: why there will be none.
    """

    layers: nn.ModuleList | None = None
    reason: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None

    def begin(self, layers: Sequence[Any], agrees: Callable[[nn.ModuleList], bool], patient: bool) -> None:
        """Make them. layers: the fused ones. agrees: whether the model has the same logits with others. patient: in the
        background, with low priority."""
        with self._lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._make, args=(layers, agrees, patient), daemon=True)
                self.thread.start()
            thread = self.thread
        if not patient:
            thread.join()

    @torch.inference_mode()
    def _make(self, layers: Sequence[Any], agrees: Callable[[nn.ModuleList], bool], patient: bool) -> None:
        try:
            form = layers[0].form
            run = loaded(form, patient)
            made = [layer.compiled_as(CompiledLayer(run, layer.weights_of_form(), form.threads)) for layer in layers]
            columns = faster(layers[0], made[0])
            if not columns:
                raise RuntimeError("compiled layers are not faster here")
            for layer in made:
                layer.compiled.columns = columns
            found = nn.ModuleList(made)
            if not agrees(found):
                raise RuntimeError("the logits of compiled layers differ by more than rounding")
            self.layers = found
        except Exception as error:  # a compiler may fail in any way, which costs only speed
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0]


def pays(seconds: float, form: Form) -> bool:
    """Whether compiled layers pay off in a process that has spent these seconds in forward passes that they make faster.

    Those to come are not known. Compiling when the time lost so far equals the time that it takes costs at most twice the time
    of an oracle (the ski rental rule).
    """
    if seconds < _LOSS_KEPT or os.environ.get(native.VARIABLE) == "0" or compiler() is None:
        return False
    return seconds >= _LOSS or is_kept(file_of(form))


def faster(layer: Layer, compiled: Layer) -> frozenset[int]:
    """The numbers of columns for which a compiled layer agrees with a layer and is faster."""
    found: list[int] = []
    least = 1
    for most in _COLUMNS:
        own, other = (one.trial(most, _TOP) for one in (layer, compiled))
        for one, two in zip(own(), other(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
        if seconds(other) < seconds(own):
            found += range(least, most + 1)
        least = most + 1
    return frozenset(found)


def seconds(run: Callable[[], Any]) -> float:
    """The least time of a few runs."""
    return min(timeit.repeat(run, number=1, repeat=10))


def compiler() -> str | None:
    """The C++ compiler that torch's compiler calls; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return f"{platform.machine()} {platform.processor()}"
    lines = file.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def file_of(form: Form) -> Path:
    return native.folder() / f"layer-{form.key}.pt2"


def digest_of(file: Path) -> Path:
    return file.with_suffix(".sha256")


def is_kept(file: Path) -> bool:
    """Whether code is on disk, whole and of this user."""
    try:
        if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
            return False
        return digest_of(file).read_text() == hashlib.sha256(file.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def loaded(form: Form, patient: bool) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The code of a form, compiled if it is not on disk, or not readable there."""
    file = file_of(form)
    if not is_kept(file):
        compile_to(form, file, patient)
    return load_compiled(str(file))


RUNNING: set[subprocess.Popen[bytes]] = set()
_ONE = threading.Lock()  # one compiler at a time


def compile_to(form: Form, file: Path, patient: bool) -> None:
    """Compile in another process, which ends with this one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _ONE, tempfile.TemporaryDirectory(prefix=f"{file.name}.", dir=file.parent) as work:
        if is_kept(file):  # by another thread
            return
        partial, threads = Path(work, file.name), "1" if patient else str(os.cpu_count() or 1)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": threads,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(work, "inductor")),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-m", "assisted.fast.exported", json.dumps(asdict(form)), str(partial)]
        process = subprocess.Popen(
            [*command, str(os.getpid()), *(["patient"] if patient else [])],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its own compilers end with it
        )
        RUNNING.add(process)
        try:
            _, said = process.communicate(timeout=_SECONDS)
        finally:
            _end(process)
        if process.returncode:
            lines = said.decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"the compiler failed: {lines[-1] if lines else process.returncode}")
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        digest_of(partial).write_text(digest)
        partial.replace(file)
        digest_of(partial).replace(digest_of(file))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, 9) if hasattr(os, "killpg") else process.kill()
    RUNNING.discard(process)


@atexit.register
def _end_all() -> None:
    for process in list(RUNNING):
        _end(process)


def is_few(hidden: torch.Tensor) -> bool:
    """Whether a forward pass over these hidden states, [R, n, D], is one that compiled layers may run."""
    return len(hidden) == 1 and hidden.shape[1] <= _COLUMNS[-1]


def fits(form: Form | None) -> bool:
    """Whether layers of this form may run as compiled code."""
    return form is not None and form.entries >= LEAST and importlib.util.find_spec("torch._inductor") is not None
