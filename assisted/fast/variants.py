"""The libraries in C: the sources, instruction sets and flags of each, and how a wheel's are built.

Knows no torch, because `setup.py` runs this file by itself. `native` chooses a library and loads it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE / "kernels"
"""The folder of the sources in C."""
PREBUILT = HERE / "prebuilt"
"""The folder of the libraries that came with a wheel, in a folder named after `stamp`."""
_AVX512 = "avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"
PROCESSORS: tuple[tuple[str, ...], ...] = (
    (*_AVX512, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    (*_AVX512, "avx512_bf16", "avx512_vnni"),
    (*_AVX512, "avx512_vnni"),
    _AVX512,
    ("avx2", "fma", "avx_vnni"),
    ("avx2", "fma"),
)  # what processors of x86-64 can do, as Linux names it; the first that fits
ARM: dict[tuple[str, ...], tuple[str, ...]] = {("asimddp",): ("-march=armv8.2-a+dotprod",), (): ()}
"""The same of 64-bit ARM, and the compiler's flags."""
MACHINES = {"x86_64": False, "amd64": False, "aarch64": True, "arm64": True}
"""Names of machines that the code in C is for, and whether they are ARM."""
_LINKED = "-shared", "-fPIC"
# a product and a sum are contracted only where the code says so, or the compiler would choose that for each number of columns
_OF_NATIVE = "-O3", "-ffp-contract=off", "-fopenmp"
# torch's runtime on Windows, and what Clang's code calls there
_RUNTIME = "libiomp5md.dll"
_CALLS = """omp_get_thread_num omp_get_num_threads __kmpc_barrier __kmpc_fork_call __kmpc_global_thread_num
__kmpc_push_num_threads __kmpc_serialized_parallel __kmpc_end_serialized_parallel __kmpc_for_static_init_4
__kmpc_for_static_init_8 __kmpc_for_static_fini"""


@dataclass(frozen=True)
class Variant:
    """A library for processors of one kind. source: the file in `KERNELS`. needs: what the processor has to have, as Linux
    names it."""

    source: str
    numbers: str
    needs: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        return "-".join((Path(self.source).stem, self.numbers, *self.needs))


def of_native(needs: tuple[str, ...], is_arm: bool, in_float32: bool) -> Variant:
    """The products and layers for an entry of `PROCESSORS` or `ARM`, in float32 or bfloat16."""
    if in_float32:
        needs = tuple(name for name in needs if not name.endswith(("vnni", "bf16")) and "amx" not in name)
    own = ARM[needs] if is_arm else _machine_flags(needs)
    own = (*own, "-DFLOAT32") if in_float32 else own
    return Variant("native.c", "float32" if in_float32 else "bfloat16", needs, (*_OF_NATIVE, *_LINKED, *own))


def _machine_flags(needs: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("-m" + name.replace("_", "-" if name.startswith("amx") else "") for name in needs)


def stamp() -> str:
    """Which sources and flags libraries are made from."""
    files = *sorted(KERNELS.glob("*.c")), *sorted(KERNELS.glob("*.h")), Path(__file__)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def library(variant: Variant) -> Path:
    """Where a wheel has the library."""
    return PREBUILT / stamp() / f"{variant.name}{'.dll' if sys.platform == 'win32' else '.so'}"


def all_of(system: str, machine: str) -> list[Variant]:
    """Every library of a system ("linux", "macosx" or "win") and a machine. Raises ValueError if there are none."""
    if machine not in MACHINES or system not in ("linux", "macosx", "win"):
        raise ValueError(f"the libraries in C are not for {system} on {machine}")
    is_arm = MACHINES[machine]
    found: dict[str, Variant] = {}
    for needs in ARM if is_arm else PROCESSORS:
        # only Linux is asked for tiles, and each Mac on ARM has dot products
        if (system == "linux" or "amx_tile" not in needs) and (system != "macosx" or needs):
            found.update((one.name, one) for one in (of_native(needs, is_arm, small) for small in (False, True)))
    return [*found.values()]


def build(folder: Path, system: str, machine: str, compiler: list[str]) -> None:
    """Compile all libraries of a system and a machine into a folder. They link no OpenMP runtime: torch brings one, which
    `native` finds. compiler: GCC for Linux, Clang for macOS, `python -m ziglang cc -target ...` for Windows.

    Raises CalledProcessError if the compiler fails.
    """
    kept = folder / stamp()
    kept.mkdir(parents=True, exist_ok=True)
    for variant in all_of(system, machine):
        flags = [flag for flag in variant.flags if flag != "-shared"]
        if system == "macosx":
            flags[flags.index("-fopenmp")] = "-Xclang"
            flags.insert(flags.index("-Xclang") + 1, "-fopenmp")
            flags = [flag for flag in flags if not flag.startswith("-march")]  # each Mac on ARM can do more
        with tempfile.TemporaryDirectory() as own:
            code = str(Path(own, "code.o"))
            subprocess.run([*compiler, *flags, "-c", str(KERNELS / variant.source), "-o", code], check=True)
            linked = {"macosx": ["-Wl,-undefined,dynamic_lookup"], "linux": ["-Wl,-s"], "win": []}[system]
            if system == "win":
                calls, runtime = Path(own, "calls.def"), Path(own, "runtime.lib")
                calls.write_text("\n".join((f"LIBRARY {_RUNTIME}", "EXPORTS", *_CALLS.split())))
                tool = [*compiler[: compiler.index("cc")], "dlltool", "-m", "i386:x86-64"]
                subprocess.run([*tool, "-d", str(calls), "-l", str(runtime)], check=True)
                linked = [str(runtime)]
            made = Path(own, f"{variant.name}{'.dll' if system == 'win' else '.so'}")
            subprocess.run([*compiler, "-shared", code, *linked, "-lm", "-o", str(made)], check=True)
            shutil.copy(made, kept)  # without what a linker puts beside it
