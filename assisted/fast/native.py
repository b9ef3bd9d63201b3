"""Products, norms and layers in C for models in bfloat16 and float32: a wheel's, or compiled once by the system's C compiler.

torch's own products with 8 or 4 bits take twice as long for five columns as for one. These take little longer, and a column's
bits do not depend on the other columns. Knows tensors and the compiler; `products` and `fused` decide where they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import mmap
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..core import acceptance
from . import variants
from .structs import STRUCTS, End, Layer, Norm, Pass, Product, pointer, pointers, require, require_layout

VARIABLE = "ASSISTED_KERNELS"
"""The environment variable with the folder that keeps the compiled library; "0": compile nothing. By default, a folder in the
user's cache folder."""
_CHOSEN = f"{VARIABLE} is 0"
COST = "decoding takes 1.3 to 7 times as long, as measured with two small models"
LACKING = "The kernels in C do not run here"
_COMPILER = (
    "a C compiler (Debian and Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc; conda: conda install -c conda-forge "
    "c-compiler, and activate the environment again)"
)
DTYPES = torch.bfloat16, torch.float32
GROUP = 32  # inputs that share a scale and a zero point; inputs are padded to a multiple
OUTPUTS = 32  # outputs of packed weights are padded to a multiple,
STREAMED = 64  # and those of weights that are read where they are
TILE = 16  # outputs that lie together
AT_ONCE = 256  # columns of a layer
HASHED = 2**18  # bytes that give one number
FLOAT32_COLUMNS = 256  # up to which products of float32 are as fast as torch's
WIDEST = 256  # the largest head size
_BYTES = {32: 4096, 16: 2048, 8: 1024, 4: 640}  # of a group of inputs for `OUTPUTS`, by the bits of a weight
MOST = 1024  # the most columns of a product of bfloat16 by itself; for more, torch's own products are as fast
IN_PLACE_COLUMNS = 128  # the same where weights are read where the model has them
PROCESSORS = variants.PROCESSORS
# of products by AVX512-BF16: that they take less time than those in float32, and about as long from the model's own weights as
# from copies; and that the processor reads packed weights faster when it is asked for them ahead
DIRECT, IN_PLACE, FETCHES = "direct", "in place", "fetches"
_ALWAYS, _IF_LISTED = 1, 2  # values of `rows_suffice`
_OF_TORCH = {"fma": "fma3", **{f"avx512{part}": f"avx512_{part}" for part in ("f", "bw", "vl", "dq")}}
SECONDS = 120  # for the compiler
ready: dict[torch.dtype, Any] = {}  # the libraries that a product or layer has asked for
too_slow: set[str] = set()  # compilers of which this process expects nothing more
_has_warned = False


def folder() -> Path:
    """The folder that keeps compiled code: the first of `_folders` that can be written. Raises OSError if none can."""
    reasons = []
    for place in _folders():
        try:
            return _opened(place)
        except OSError as error:
            reasons.append(str(error))
    raise OSError("; ".join(reasons))


def _folders() -> list[Path]:
    """The folder that is named, else one in the user's cache; and one of this user among temporary files."""
    where = os.environ.get(VARIABLE, "0")
    found = [] if where in ("", "0") else [Path(where)]
    with contextlib.suppress(RuntimeError):  # a user without a home
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        found = found or [Path(cache) / "assisted"]
    return [*found, _temporary()]


def _temporary() -> Path:
    """This user's folder among temporary files."""
    return Path(tempfile.gettempdir()) / f"assisted-{os.getuid()}"


def _opened(place: Path) -> Path:
    """A folder that this user can write. Raises OSError for another one, and for one among temporary files, where everybody
    makes folders, that is not this user's alone: its libraries are run."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place == _temporary():
        about = place.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise PermissionError(f"{place} is not a folder of this user alone")
    if not os.access(place, os.W_OK):
        raise PermissionError(f"{place} cannot be written")
    return place


def lacking(reason: str) -> str | None:
    """What to tell the user of a model that could run in C. reason: why it does not, of `loaded`. None if it does, or if the
    user has chosen that. The first time in a process, it is a Python warning, too."""
    global _has_warned
    if reason in ("", _CHOSEN):
        return None
    told = f"{LACKING}, so {COST}: {reason}. {VARIABLE}=0 chooses that, without this warning."
    if not _has_warned:
        _has_warned = True
        warnings.warn(told, stacklevel=2)
    return told


@functools.cache
def loaded(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, str]:
    """The library compiled for numbers of a dtype, bfloat16 or float32, and an empty string; or None and why there is none."""
    if os.environ.get(VARIABLE, "") == "0":
        return None, _CHOSEN
    machine = platform.machine().lower()
    if machine not in variants.MACHINES or not (platform.system() == "Linux" or variants.PREBUILT.is_dir()):
        known_to = "Linux on x86-64 and 64-bit ARM"
        return None, f"they are for {known_to}, and this is {platform.system()} on {platform.machine()}"
    known, reason = processor_flags(), "they need AVX2 or AVX512, which this processor does not have"
    is_arm = variants.MACHINES[machine]
    fitting = [names for names in (variants.ARM if is_arm else PROCESSORS) if known.issuperset(names)]
    fitting.sort(
        key=lambda names: "avx512_bf16" in names and "amx_tile" not in names and DIRECT not in known_of_processor()
    )
    for names in fitting:
        variant = variants.of_native(names, is_arm, dtype == torch.float32)
        library, reason = prebuilt_or_compiled(variant)
        if library is None or ("amx_tile" in variant.needs and not library.may_use_tiles()):
            continue  # an old compiler, or a system that grants no tiles
        ready[dtype] = declared(library)
        return ready[dtype], ""
    return None, reason


def declared(library: Any) -> Any:
    """The library, with the types of its functions. Raises OtherLayout if its structs are others."""
    require_layout(library, *STRUCTS)
    library.of_group = c_int64.in_dll(library, "most_of_group").value
    library.fetches = c_int64.in_dll(library, "fetches")
    suffice, known = c_int64.in_dll(library, "rows_suffice").value, known_of_processor()
    library.rows_suffice = suffice == _ALWAYS or (suffice == _IF_LISTED and IN_PLACE in known)
    library.fetches.value |= FETCHES in known
    library.multiply.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, ctypes.c_int]
    library.layers.argtypes = [c_void_p, c_int64, *[c_void_p] * 5, c_int64, *[c_void_p] * 3]
    library.mix.argtypes = [c_void_p, *[c_int64] * 2, *[c_void_p] * 2, c_int64, *[c_void_p] * 4, ctypes.c_int]
    library.advance.argtypes = [c_void_p, *[c_int64] * 3, *[c_void_p] * 4, ctypes.c_int]
    library.highest.argtypes = [c_void_p, *[c_int64] * 3, c_void_p]
    library.list_slots.argtypes = [c_void_p, *[c_int64] * 2, *[c_void_p] * 2]
    library.move.argtypes = [c_void_p, c_int64, c_void_p, *[c_int64] * 5]
    library.norms.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    library.step_of_head.argtypes = [*[c_void_p] * 6, c_int64, *[c_void_p] * 2]
    library.logits_of_head.argtypes = [*[c_void_p] * 2, c_int64, *[c_void_p] * 3, ctypes.c_int]
    library.read_level.argtypes, library.add_level.argtypes = [*[c_void_p] * 5, c_int64], [c_void_p] * 2
    library.fuse_features.argtypes = library.logits_of_head.argtypes
    library.hash_parts.argtypes = [c_void_p, *[c_int64] * 2, c_void_p, ctypes.c_int]
    given = "multiply list_slots highest norms logits_of_head fuse_features hash_parts mix advance"
    for name in given.split():
        getattr(library, name).restype = None
    for name in ("layers", "move", "step_of_head", "add_level"):
        getattr(library, name).restype = c_int64
    library.read_level.restype = c_float
    return library


def processor_model() -> str:
    """Vendor, family and model of the processor, as Linux numbers them: "AuthenticAMD 25 17"."""
    fields = (line.partition(":") for line in reversed(cpuinfo().splitlines()))
    known = {name.strip(): value.strip() for name, _, value in fields}
    return " ".join(known.get(name, "") for name in ("vendor_id", "cpu family", "model"))


def known_of_processor() -> set[str]:
    """What is known of AVX512-BF16 on this model of a processor: `DIRECT`, `IN_PLACE`, `FETCHES`.

    `processors.json` holds such models, as `benchmarks/run.py instructions --note` found them. The ways round differently, so
    equal processors must choose alike: nothing is measured here, and models that are not listed sum in float32.
    """
    return set(json.loads(Path(__file__).with_name("processors.json").read_text()).get(processor_model(), ()))


def processor_flags() -> set[str]:
    """What the processor can do, as Linux names it."""
    if platform.system() == "Linux":
        return set(cpuinfo().split())
    if platform.system() == "Darwin":
        return {"asimddp"}  # each Mac on ARM
    found = {name for name, has in getattr(torch.cpu, "get_capabilities", dict)().items() if has is True}
    return found | {own for own, name in _OF_TORCH.items() if name in found}


def cpuinfo() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.is_file() else ""


def prebuilt_or_compiled(variant: variants.Variant) -> tuple[Any, str]:
    """A library that came with the wheel, or else is compiled, and an empty string; or None and why there is none."""
    if os.environ.get(VARIABLE, "") == "0":
        return None, _CHOSEN
    file, refused = variants.library(variant), ""
    if file.is_file():
        try:
            _share_openmp()
            return ctypes.CDLL(str(file)), ""
        except OSError as error:
            refused = f"{file.name} of this installation cannot be loaded ({error}); "
    elif variants.PREBUILT.is_dir():
        refused = f"this installation has no {file.name} that was made from its own sources; "
    library, reason = compiled(variant.source, variant.flags)
    return library, f"{refused}{reason}" if library is None else ""


class _Found(ctypes.Structure):
    _fields_ = (("file", ctypes.c_char_p), ("base", c_void_p), ("symbol", ctypes.c_char_p), ("address", c_void_p))


@functools.cache
def _share_openmp() -> None:
    """Let a wheel's libraries, which link no OpenMP runtime, find the one that torch runs with: a second one in a process would
    have threads of its own. Windows finds it by its name."""
    if platform.system() == "Windows":
        return
    name = "libtorch_cpu.dylib" if platform.system() == "Darwin" else "libtorch_cpu.so"
    with contextlib.suppress(OSError, AttributeError):  # another torch may link its runtime into itself
        own = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / name))
        run = own.__kmpc_fork_call if platform.system() == "Darwin" else own.GOMP_parallel
        found = _Found()
        own.dladdr.argtypes = [c_void_p, c_void_p]
        if own.dladdr(ctypes.cast(run, c_void_p), ctypes.byref(found)):
            ctypes.CDLL(os.fsdecode(found.file), mode=ctypes.RTLD_GLOBAL)


def compiled(name: str, flags: Sequence[str]) -> tuple[Any, str]:
    """A file of `variants.KERNELS` as a library, compiled once, and an empty string; or None and why there is none."""
    if os.environ.get(VARIABLE, "") == "0":
        return None, _CHOSEN
    if platform.system() != "Linux":
        return None, f"they are for Linux, and this is {platform.system()}"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None, f"no C compiler was found; install {_COMPILER}"
    if shutil.which(compiler.split()[0]) is None:
        return None, f"CC names {compiler}, which is not here; install {_COMPILER}, and leave CC out"
    source = variants.KERNELS / name
    text = b"".join(part.read_bytes() for part in (source, *sorted(source.parent.glob("*.h"))))
    key = hashlib.sha256(text + " ".join((compiler, *flags)).encode()).hexdigest()[:16]
    reasons = []
    for place in _folders():
        try:
            return _kept(compiler, [*flags, str(source), "-lm"], place / f"{source.stem}-{key}.so"), ""
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines() or [str(error)]
            line = next((line for line in said if "error" in line), said[-1])
            return None, f"{compiler} failed ({line}); install {_COMPILER}"
        except subprocess.TimeoutExpired:
            too_slow.add(compiler)
            return None, f"{compiler} took longer than {SECONDS} s; the next process tries it again"
        except OSError as error:
            reasons.append(str(error))
    return None, f"no folder keeps what is compiled ({'; '.join(reasons)}); name one in {VARIABLE} that can be written"


def _kept(compiler: str, given: list[str], file: Path) -> Any:
    """A library that this user has compiled, or root for all users; else it is compiled now."""
    is_safe = False
    with contextlib.suppress(OSError):
        about = file.stat()
        is_safe = about.st_uid in (0, os.getuid()) and not about.st_mode & 0o022
    if not is_safe or file.parent == _temporary():
        _opened(file.parent)
    if not is_safe:
        _compile(compiler, given, file)
    return ctypes.CDLL(str(file))


def _compile(compiler: str, given: list[str], file: Path) -> None:
    if compiler in too_slow:
        raise subprocess.TimeoutExpired(compiler, SECONDS)
    with tempfile.TemporaryDirectory(prefix=f"{file.name}.", dir=file.parent) as folder:
        partial, own = Path(folder, file.name), {**os.environ, "TMPDIR": folder}  # for the compiler's files
        command = [*compiler.split(), *given, "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, env=own)
        partial.chmod(0o755)
        partial.replace(file)  # another process loads the whole file or none


def is_available(dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether products and layers in C of a dtype run here; compiles them if that has not been done."""
    return dtype in DTYPES and loaded(dtype)[0] is not None


def hashes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Numbers that change with every single value of a contiguous tensor on a CPU, [any] int64, at the speed of memory; None if
    nothing runs in C here, or for a dtype that no model in C has."""
    library = loaded(tensor.dtype if tensor.dtype in DTYPES else torch.bfloat16)[0]
    if library is None or not (tensor.dtype in DTYPES or tensor.itemsize == 1):
        return None
    found = torch.empty(-(-tensor.nbytes // HASHED), dtype=torch.int64)
    library.hash_parts(tensor.data_ptr(), tensor.nbytes, HASHED, found.data_ptr(), torch.get_num_threads())
    return found


def suffices_in_place(dtype: torch.dtype) -> bool:
    """Whether products of a few columns take about as long from the model's own weights as from packed copies: with AVX2, where
    computing takes longer than reading, and on some processors with AVX512-BF16."""
    library = loaded(dtype)[0] if dtype in DTYPES else None
    return library is not None and library.rows_suffice


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight of float32 or bfloat16, or its levels in int8, [out, in], in the kernels' layout, [out / 32, any] uint8."""
    weight = _padded(weight.detach())
    together = 1 if weight.dtype == torch.float32 else 2
    pairs = weight.view(-1, OUTPUTS, weight.shape[1] // together, together)
    return in_large_pages(pairs.transpose(1, 2).flatten(1).contiguous().view(torch.uint8))


def packed_8(levels: torch.Tensor) -> torch.Tensor:
    """The same of levels in int8 for products with inputs of 8 bits, stored plus 128. A group is, of each tile, eight lines of
    four inputs for sixteen outputs, in the order in which C rounds inputs."""
    levels = _padded(levels.detach().to(torch.int16)) + 128
    order = torch.tensor([[0, 4, 1, 5], [2, 6, 3, 7]])
    eights = levels.view(-1, 2, TILE, levels.shape[1] // GROUP, GROUP // 8, 8)[..., order]
    # shape: [out / 32, tiles, outputs of a tile, groups, eights, halves, 4]
    lines = eights.permute(0, 3, 1, 4, 5, 2, 6).to(torch.uint8)
    return in_large_pages(lines.flatten(1).contiguous())


def packed_4(steps: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The same of steps 0 to 15, [out, in], with bfloat16 scales and zero points of groups, [out, in / 32].

    A group of two tiles is eight lines of 64 bytes of steps, those of both in turn, then a line of scales and zero points of
    each. Four pairs of inputs share the words of a vector.
    """
    steps = _padded(steps.to(torch.int32))
    groups = steps.shape[1] // GROUP
    words = steps.view(-1, 2, TILE, groups, 4, 4, 2).permute(0, 3, 4, 1, 2, 6, 5)
    # shape: [out / 32, groups, 4, tiles, outputs of a tile, 2, pairs of a word]
    shifted = (words << torch.arange(0, 16, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    nibbles = shifted.to(torch.int16).flatten(2).view(torch.uint8)  # wraps around
    beside = torch.stack([F.pad(part, (0, 0, 0, len(steps) - len(part))) for part in (scales, zeros)], 1)
    beside = beside.view(-1, 2, TILE, 2, groups).permute(0, 4, 1, 3, 2).flatten(2).contiguous().view(torch.uint8)
    return in_large_pages(torch.cat([nibbles, beside], -1).flatten(1))


def _padded(weight: torch.Tensor) -> torch.Tensor:
    outputs, inputs = weight.shape
    return F.pad(weight.contiguous(), (0, -inputs % GROUP, 0, -outputs % OUTPUTS))


def _addresses(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where the rows of weights, [out, in] each, lie; filled up to a multiple of `STREAMED` with the first one's."""
    if any(part.stride(1) != 1 or not part.is_cpu or part.shape[1] % GROUP for part in weights):
        raise ValueError(f"code in C takes rows of a multiple of {GROUP} numbers that lie together on a CPU")
    rows = [part.data_ptr() + part.itemsize * part.stride(0) * torch.arange(len(part)) for part in weights]
    return F.pad(torch.cat(rows), (0, -sum(map(len, rows)) % STREAMED), value=weights[0].data_ptr())


_LINE, _PAGE, _PIECE = 64, 2 << 20, 32 << 20
_filling = threading.Lock()
_pieces: weakref.WeakValueDictionary[int, mmap.mmap] = (
    weakref.WeakValueDictionary()
)  # by address; freed with their last weight
_piece: mmap.mmap | None = None  # that is being filled, from this byte on
_used = 0


@torch.inference_mode(False)
@torch.no_grad()
def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of bytes in memory with pages of 2 MiB, where the system has them. Weights are read up to twice as
    fast from there, since the processor looks up few addresses. Weights that are made one after the other lie so.
    """
    global _piece, _used
    size = -(-tensor.nbytes // _LINE) * _LINE
    with _filling:
        if _piece is None or _used + size > len(_piece):
            _piece = _new_piece(max(size, _PIECE))
        place = torch.frombuffer(_piece, dtype=torch.uint8, count=tensor.nbytes, offset=_used)
        _used += size
    return place.view(tensor.shape).copy_(tensor)


def _new_piece(size: int) -> mmap.mmap:
    global _used
    memory = mmap.mmap(-1, (-(-size // _PAGE) + 1) * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without such pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    _used = -address % _PAGE
    _pieces[address] = memory
    return memory


def end_to_end(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors of `in_large_pages` that lie one after the other, as one of the same memory, [sum, any]; None for others."""
    first = at = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at or part.dtype != torch.uint8:
            return None
        at += part.nbytes
    for address, memory in list(_pieces.items()):
        if address <= first and at <= address + len(memory):
            whole = torch.frombuffer(memory, dtype=torch.uint8, count=at - first, offset=first - address)
            return whole.view(-1, parts[0].shape[1])
    return None


class NativeProduct:
    """A product with a weight in the kernels' layout, or of float32 or bfloat16 where the model has it.

    Args:
        weights: of `packed` and the like, with 32, 16, 8 or 4 bits; or a list of [out, inputs] whose outputs are concatenated,
            read where they are, in numbers that lie together along inputs.
        inputs: padded to a multiple of `GROUP`.
        bits: 32 for products of float32; 16, 8 or 4 for those of bfloat16.
        scales: of 8 bits, [out] float32.
        bias: [out], or None.
        input_bits: 16, or 8 beside weights of 8 (of `packed_8`) or 4 bits: a column's inputs are rounded with a scale for each
            group, and the products are those of integers.
    """

    def __init__(
        self,
        weights: torch.Tensor | Sequence[torch.Tensor],
        inputs: int,
        bits: int,
        scales: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        input_bits: int = 16,
    ):
        packed = weights if isinstance(weights, torch.Tensor) else None
        self.held: tuple[Any, ...] = () if packed is not None else tuple(part.detach() for part in weights)
        rows = None if packed is not None else _addresses(self.held)
        self.inputs, self.outputs = inputs, OUTPUTS * len(weights) if rows is None else len(rows)
        self.dtype = torch.float32 if bits == 32 else torch.bfloat16
        self.library = loaded(self.dtype)[0]
        self.in_place = packed is None
        is_limited = self.in_place and (bits == 32 or not self.library.rows_suffice)
        self.most = IN_PLACE_COLUMNS if is_limited else FLOAT32_COLUMNS if bits == 32 else MOST
        """The most columns for which this is the fastest product."""
        full = [None if part is None else F.pad(part.float(), (0, self.outputs - len(part))) for part in (scales, bias)]
        self.held += packed, rows, *full
        blocks = self.outputs // OUTPUTS * (inputs // GROUP)
        addresses = (
            pointer(packed, torch.uint8, blocks * _BYTES[bits]),
            *(pointer(p, torch.float32, self.outputs) for p in full),
            pointer(rows, torch.int64, self.outputs),
        )
        self.struct = Product(*addresses, self.outputs, inputs, bits, input_bits, 1.0)

    def __call__(self, columns: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs], in its dtype."""
        columns = columns.contiguous()  # the last columns of several rows lie apart
        n, threads = len(columns), torch.get_num_threads()
        made = columns.new_empty(n, self.outputs)
        scratch = torch.empty(threads * n * (self.inputs // GROUP) * self.library.of_group)
        own, given = ctypes.addressof(self.struct), pointer(columns, self.dtype, n * self.inputs)
        self.library.multiply(own, given, n, made.data_ptr(), scratch.data_ptr(), threads)
        return made


class NativeNorm:
    """A norm of bfloat16 or float32.

    Args:
        norm: gives weight and bias, of that dtype or None, their size, a multiple of 16, and epsilon.
        flags: of `norms.NormKind`.
    """

    def __init__(self, norm: Any, flags: int, dtype: torch.dtype):
        held = [None if part is None else part.detach().contiguous() for part in (norm.weight, norm.bias)]
        self.dtype, self.held, self.library, self.size = dtype, held, loaded(dtype)[0], norm.size
        weight, _ = held
        apart = norm.size if weight is not None and weight.dim() > 1 else 0
        lengths = 0 if weight is None else weight.numel(), norm.size
        addresses = (pointer(part, dtype, length) for part, length in zip(held, lengths, strict=True))
        self.struct = Norm(*addresses, norm.size, apart, flags, norm.epsilon)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        hidden, made = hidden.contiguous(), torch.empty_like(hidden, memory_format=torch.contiguous_format)
        count = hidden.numel() // self.size
        given = pointer(hidden, self.dtype, count * self.size), count, made.data_ptr()
        self.library.norms(ctypes.addressof(self.struct), *given)
        return made


@dataclass(frozen=True)
class Shape:
    """What a layer computes beside products and norms, as kernels/layer.h has it.

    Attributes:
        key_heads, head_size, scaling: of its attention.
        turned: numbers of a head that turn, 0 for none, `turning` says how: 1 by halves, 2 by pairs; and 4 if they are rounded
            at the end alone.
        norms_turned: queries and keys are normed after they have turned.
        has_gates: each query head has a gate after it.
        is_eager: scores are rounded as transformers' eager attention rounds them.
        cap: the soft cap of scores, 0 for none.
        beside: the MLP reads what attention reads.
        activation: the index in `ACTIVATIONS`. is_gated: it is multiplied by half of the first product's outputs.
        multiplier: of what is added to the residual stream.
        kind: of its masks and angles, None where all layers of a model share them.
        learned: of xIELU, its factors for positive and for negative numbers, beta and epsilon.
    """

    key_heads: int = 0
    head_size: int = 1
    scaling: float = 1.0
    turned: int = 0
    turning: int = 0
    norms_turned: bool = False
    has_gates: bool = False
    is_eager: bool = False
    cap: float = 0.0
    beside: bool = False
    activation: int = 0
    is_gated: bool = True
    multiplier: float = 1.0
    kind: str | None = None
    learned: tuple[float, ...] = ()


ACTIVATIONS = "silu", "gelu_tanh", "gelu", "relu2", "xielu"


@dataclass(frozen=True)
class Rule:
    """The gated delta rule of a layer, as C takes it. held: the tensors that the struct points to."""

    struct: Any
    held: tuple[torch.Tensor | None, ...]

    @property
    def channels(self) -> int:
        """Of the convolution."""
        own = self.struct
        channels: int = 2 * own.key_heads * own.dk + own.heads * own.dv
        return channels


class NativeLayer:
    """A layer of products and norms, all of one dtype, with attention or the gated delta rule.

    Args:
        products: for the mixer's input (of queries, keys and values together); of its output; of gate and up together; of down.
            Without the last two, the layer ends after its mixer.
        norms: before and after the mixer, before and after the MLP, of queries and of keys; None for no norm.
        shape: what else it computes.
        sinks: [query heads], scores that take part in softmax and have no value; None for none.
        rule: of layers without attention.
    """

    def __init__(
        self,
        products: Sequence[NativeProduct],
        norms: Sequence[NativeNorm | None],
        shape: Shape,
        sinks: torch.Tensor | None = None,
        rule: Rule | None = None,
    ):
        heads, output, *mlp = self.products = products
        self.norms, self.kind, self.is_whole, self.rule = norms, shape.kind, len(mlp) > 0, rule
        self.dtype, self.library = heads.dtype, heads.library
        self.sinks = None if sinks is None else sinks.detach().contiguous()
        limited = self.dtype == torch.float32 or any(product.most < MOST for product in products)
        self.most = min(product.most for product in products) if limited else sys.maxsize
        """The most columns of a prompt for which this is the fastest layer."""
        hidden, inner = output.outputs, mlp[1].inputs if mlp else 0
        # of the buffer for a column, and the widest input
        numbers = 3 * hidden + heads.outputs + (1 + shape.has_gates) * output.inputs + 3 * inner
        self.sizes = numbers, max(heads.inputs, inner, output.inputs)
        structs = [product.struct for product in products] + [Product()] * (4 - len(products))
        self.struct = Layer(
            *structs,
            *(Norm() if norm is None else norm.struct for norm in norms),
            *(hidden, inner, output.inputs // shape.head_size, shape.key_heads, shape.head_size),
            *(shape.turned, shape.turning, shape.norms_turned, shape.is_eager, shape.beside),
            *(shape.activation, shape.is_gated, shape.has_gates, shape.scaling, shape.cap),
            pointer(self.sinks, self.dtype, output.inputs // shape.head_size),
            *shape.learned,
        )
        if rule is not None:
            self.struct.delta = rule.struct
        for product in (self.struct.output, self.struct.down):
            product.multiplier = shape.multiplier

    def of_stores(self, rows: int, capacity: int) -> list[tuple[torch.dtype, int]]:
        """Dtype and count of its keys and its values, with so many slots; or of its two states."""
        own, rule = self.struct, self.rule
        if rule is None:
            return [(self.dtype, rows * own.key_heads * capacity * own.head_size)] * 2
        of_states = rows * rule.struct.heads * rule.struct.dk * rule.struct.dv
        return [(self.dtype, rows * rule.channels * rule.struct.size), (torch.float32, of_states)]


class NativeLayers:
    """Layers of one dtype and hidden size, which run one after the other.

    Args:
        layers: the layers.
        norm, output: of a whole model, the norm after them, and the product for the logits.
    """

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        norm: NativeNorm | None = None,
        output: NativeProduct | None = None,
    ):
        self.layers, self.output, self.norm = layers, output, norm
        self.dtype, self.library = layers[0].dtype, layers[0].library
        buffer, widest = map(max, zip(*(layer.sizes for layer in layers), strict=True))
        self.sizes: tuple[int, int] = buffer, widest
        self.end = None if output is None or norm is None else End(output.struct, norm.struct)
        self.addresses = (c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
        self.attends = [2 * at for at, layer in enumerate(layers) if layer.rule is None]  # where their keys are
        self.made_for: tuple[int, int] | None = None

    def places(self, stores: Sequence[torch.Tensor], rows: int) -> tuple[Any, int]:
        """The addresses of two tensors of each layer: keys and values, or states; and the slots of a head."""
        capacity = stores[self.attends[0]].shape[2] if self.attends else 0
        if self.made_for != (rows, capacity):
            parts = [part for layer in self.layers for part in layer.of_stores(rows, capacity)]
            self.made_for, self.of_stores = (rows, capacity), tuple(zip(*parts, strict=True))
        return pointers(stores, *self.of_stores), capacity

    def one(
        self,
        hidden: torch.Tensor,
        one: torch.Tensor,
        two: torch.Tensor,
        around: NativePass,
        beside: torch.Tensor | None,
    ) -> torch.Tensor:
        """`run` of a single layer, [R, n, hidden] -> [R, n, hidden], all contiguous. one, two: keys and values, or states."""
        made = torch.empty_like(hidden)
        self.run(hidden, [one, two], {self.layers[0].kind: around}, beside, made)
        return made

    def run(
        self,
        hidden: torch.Tensor,
        stores: Sequence[torch.Tensor],
        around: Mapping[str | None, NativePass],
        beside: torch.Tensor | None = None,
        made: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        notes: Any = None,
    ) -> None:
        """stores: keys and values of each, or its states. around: the same pass for each kind of layer. beside: of the first
        one. made: gets the outputs, [layers, R, n, hidden]; None, for a single layer, if only its keys and values are needed.
        logits: gets those of a whole model, [R, n, outputs]. notes: an array of addresses for what layers with the delta rule
        read, four for each layer; None if their states become those after the columns."""
        first, each, dtype, own = self.layers[0], self.addresses, self.dtype, next(iter(around.values()))
        columns, size = own.columns, first.struct.hidden
        places, capacity = self.places(stores, own.rows)
        read = pointer(beside, dtype, columns * first.products[0].inputs)
        given = pointer(hidden, dtype, columns * size), read, ctypes.addressof(places), notes, capacity
        end = None if logits is None or self.end is None else ctypes.addressof(self.end)
        found = pointer(made, dtype, len(each) * columns * size)
        last = None if self.output is None else pointer(logits, dtype, columns * self.output.outputs)
        addresses = {kind: part.buffer(self, capacity) for kind, part in around.items()}
        of_any = addresses[next(iter(around))]  # those of the delta rule have no kind
        passes = (c_void_p * len(each))(*(addresses.get(layer.kind, of_any) for layer in self.layers))
        require(
            self.library.layers(ctypes.addressof(each), len(each), ctypes.addressof(passes), *given, found, end, last)
        )


def top1(scores: torch.Tensor) -> torch.Tensor:
    """As `core.acceptance.top1`, in a fifth of the time over a vocabulary, of scores whose library is there."""
    library = ready.get(scores.dtype) if scores.is_cpu else None
    if library is None or scores.stride(-1) != 1 or scores.numel() == 0:
        return acceptance.top1(scores)
    rows = scores.reshape(-1, scores.shape[-1])
    found = torch.empty(len(rows), dtype=torch.int64)
    sizes = len(rows), rows.stride(0), rows.shape[1]
    library.highest(rows.data_ptr(), *sizes, found.data_ptr())  # rows may lie apart
    return found.view(scores.shape[:-1])


def move(stores: Sequence[torch.Tensor], moves: torch.Tensor) -> bool:
    """See `PreparedModule.move`; operations of torch would take a fifth of a small model's pass."""
    sizes, first = {store.shape for store in stores}, stores[0]
    library = ready.get(first.dtype)
    if library is None or len(sizes) > 1 or not all(store.is_cpu and store.is_contiguous() for store in stores):
        return False
    places = pointers(stores, [first.dtype] * len(stores), [first.numel()] * len(stores))
    shape = *first.shape[:3], first.shape[3] * first.itemsize
    given = pointer(moves, torch.int64, 3 * moves.shape[1]), moves.shape[1]
    require(library.move(ctypes.addressof(places), len(stores), *given, *shape))
    return True


class NativePass:
    """What the layers of a forward pass share.

    Args:
        cos, sin: of `Angles`, [R or 1, n or 1, 1, head size].
        places: [R or 1, n], the slot that each column is written to.
        seen: [R or 1, n, any] bool, which slots from `first` on each column sees; None for all up to its own.
        rows: R.
        first, end: the slots that columns may see.
        dtype: of the layers; None for that of the angles, which may be float32 for layers that turn in float32.
    """

    def __init__(
        self,
        cos: torch.Tensor,
        sin: torch.Tensor,
        places: torch.Tensor,
        seen: torch.Tensor | None,
        rows: int,
        first: int,
        end: int,
        dtype: torch.dtype | None = None,
    ):
        width = places.shape[1]
        lists: list[torch.Tensor] = []
        self.rows, self.columns, self.end = rows, rows * width, end
        if seen is not None:
            self.end = first + seen.shape[-1]
            lists = _lists(seen.expand(rows, -1, -1), dtype or cos.dtype)
        angles = (part.expand(-1, width, -1, -1).contiguous() for part in (cos, sin))  # a tree's level has one position
        self.held = *angles, places.expand(rows, -1).contiguous(), *lists
        self.most = end - first + 2 * TILE + 1  # a query's weights, rounded up, from the start of a line on
        turned = len(cos) * width * cos.shape[-1]
        of_angles = [pointer(part, cos.dtype, turned) for part in self.held[:2]]
        of_lists = [pointer(part, torch.int64, 0) for part in lists] or (None, None)
        of_places = pointer(self.held[2], torch.int64, self.columns)
        self._begin(Pass(rows, width, None, *of_angles, len(cos), of_places, first, *of_lists))

    @classmethod
    def without_slots(cls, rows: int, width: int) -> NativePass:
        """A pass of layers without attention."""
        made = cls.__new__(cls)
        made.rows, made.columns, made.end, made.most = rows, rows * width, 0, 1
        made._begin(Pass(rows, width))
        return made

    def _begin(self, struct: Any) -> None:
        struct.threads, struct.at_once = torch.get_num_threads(), min(self.columns, AT_ONCE)
        self.struct, self.made_for = struct, (0, 0)

    def follow(self, parents: torch.Tensor | None) -> None:
        """Let the columns be those of a token tree, for layers with the delta rule. parents: [R, n - 1] int64, or None."""
        self.parents = None if parents is None or self.struct.width == 1 else parents.contiguous()
        self.struct.parents = pointer(self.parents, torch.int64, self.rows * (self.struct.width - 1))

    def require_room(self, capacity: int) -> None:
        """Raise IndexError if columns may see slots that are not there."""
        if self.end > capacity:
            raise IndexError(f"columns of a pass see {self.end} slots, and there are {capacity}")

    def buffer(self, layers: NativeLayers, capacity: int) -> int:
        """The address of the pass with buffers that suffice for layers. capacity: slots of each head."""
        self.require_room(capacity)
        if self.made_for != layers.sizes:
            struct, columns, (numbers, widest) = self.struct, self.struct.at_once, layers.sizes
            struct.of_thread = of_thread(layers.library, widest, columns, self.most)
            self.buffers = (
                torch.empty(columns * numbers, dtype=layers.dtype),
                torch.empty(struct.threads * struct.of_thread),
            )
            struct.buffer, struct.scratch = (part.data_ptr() for part in self.buffers)
            self.made_for = layers.sizes
        return ctypes.addressof(self.struct)


def _lists(seen: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Which slots each column sees, one column after the other, and where a column's begin. seen: [R, n, any] bool."""
    library = ready.get(dtype)
    if library is None:
        return [seen.nonzero()[:, 2].contiguous(), F.pad(seen.sum(-1).flatten().cumsum(0), (1, 0))]
    seen = seen.contiguous()
    columns, slots = seen.shape[0] * seen.shape[1], seen.shape[2]
    made = torch.empty(columns * slots, dtype=torch.int64), torch.empty(columns + 1, dtype=torch.int64)
    given = pointer(seen, torch.bool, columns * slots), columns, slots
    library.list_slots(*given, *(part.data_ptr() for part in made))
    return [*made]


def of_thread(library: Any, widest: int, columns: int, slots: int) -> int:
    """Numbers that a thread needs beside the buffer. widest: inputs of a product. slots: the most that a column sees, and a
    line and two tiles."""
    return max(columns * (widest // GROUP) * library.of_group, 16 * slots)


@torch.library.custom_op("assisted::low_bit_product", mutates_args=(), device_types="cpu")
def multiply(
    columns: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, bits: int, input_bits: int
) -> torch.Tensor:
    """A `NativeProduct` as an operator, for compilers. scales: empty for 4 bits. bias: empty if there is none."""
    own = scales if bits == 8 else None
    added = bias if len(bias) else None
    return NativeProduct(weights, columns.shape[1], bits, own, added, input_bits)(columns)


@multiply.register_fake
def _(
    columns: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, bits: int, input_bits: int
) -> torch.Tensor:
    return columns.new_empty(columns.shape[0], OUTPUTS * weights.shape[0])
