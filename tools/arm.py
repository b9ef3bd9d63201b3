"""The kernels' tests on 64-bit ARM, in an emulator: products, layers and the bits of columns, with dot products and without, by
the libraries of a wheel.

    python -m tools.arm [FOLDER]

Needs a Debian with `qemu-user`, `gcc-aarch64-linux-gnu`, `libc6-dev-arm64-cross` and `dpkg --add-architecture arm64`. Python
for ARM comes from Debian, wheels from PyPI; packages without compiled parts are those of this environment. Takes ten minutes.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from assisted.fast import variants

ROOT = Path(__file__).parent.parent
DEBIAN = """python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g
libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libcrypt1 libreadline8 libtinfo6 libgfortran5"""
PYPI = "torch==2.8.0 numpy<2.3 safetensors==0.8.0 tokenizers==0.23.3 hf-xet regex pyyaml markupsafe psutil"
BESIDE = "torch", "functorch", "bitsandbytes", "optimum"  # of this environment, and not for the emulator
RUN = """
import sys, types
sys.path[:0] = [ROOT, ROOT + "/tests"]
sys.modules["conftest"] = types.SimpleNamespace(PROCESSORS={})  # which needs more packages
import pytest
from assisted.fast import native, variants
import test_delta as hybrids
import test_native as tests
variants.PREBUILT = tests.Path(PREBUILT)
for flags in (set(), {"asimddp"}):
    native.processor_flags = lambda: flags
    native.loaded.cache_clear()
    assert native.is_available() and native.is_available(tests.torch.float32), native.loaded()[1]
    assert native.loaded()[0]._name.startswith(PREBUILT)
    for bits in tests.BITS:
        with pytest.MonkeyPatch.context() as patch:
            if bits in tests.IN_PLACE:
                patch.setattr(tests.fused, "may_copy", lambda parameters: False)
            for sizes in ((70, 40), (192, 576)):
                tests.test_products(bits, *sizes)
            for name in ("wide heads, biases", "norms of heads"):
                with pytest.MonkeyPatch.context() as own:
                    tests.test_layers_are_the_models(name, bits, own)
                tests.test_a_column_has_the_same_bits_alone_in_a_draft_in_a_tree_and_beside_other_rows(name, bits)
        print(*flags, f"{bits} bits: as the model, and a column keeps its bits", flush=True)
    for name in ("qwen3_next", "qwen3_5"):
        hybrids.compare(hybrids.built(name, **hybrids.WIDE))
    for dtype in native.DTYPES:
        for kind in ("chain", "tree"):
            with pytest.MonkeyPatch.context() as own:
                hybrids.test_the_rule_in_c(3, kind, (3, 3, 24, 40), dtype, own)
    print(*flags, "the gated delta rule: as the model", flush=True)
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
assert len(runtimes) == 1, runtimes  # torch's own
print("one runtime of threads:", *runtimes)
"""


def main(folder: Path) -> int:
    """Set up the emulated system in a folder, if it is not there, and run the tests. Returns Python's exit status."""
    system, wheels, site = (folder / name for name in ("system", "wheels", "site"))
    if not site.exists():
        debs = folder / "debs"
        debs.mkdir(parents=True)
        subprocess.run(
            ["apt-get", "download", "-qq", *(f"{name}:arm64" for name in DEBIAN.split())], cwd=debs, check=True
        )
        for deb in debs.iterdir():
            subprocess.run(["dpkg", "-x", deb, system], check=True)
        kinds = (f"--platform=manylinux{kind}_aarch64" for kind in ("2014", "_2_17", "_2_28"))
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.11",
            *kinds,
        ]
        subprocess.run([*pip, "-d", wheels, *PYPI.split()], check=True)
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as held:
                held.extractall(site)
        for part in Path(sysconfig.get_path("purelib")).iterdir():
            compiled = part.suffix == ".so" or any(part.rglob("*.so"))
            if not (compiled or part.name.startswith((*BESIDE, "__editable__")) or (site / part.name).exists()):
                (site / part.name).symlink_to(part)
    prebuilt = str(folder / "prebuilt")
    variants.build(Path(prebuilt), "linux", "aarch64", ["aarch64-linux-gnu-gcc"])
    env = {"PYTHONPATH": str(site), "CC": "nowhere", "ASSISTED_KERNELS": str(folder / "kernels")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = [
        "qemu-aarch64",
        "-L",
        system,
        system / "usr/bin/python3.11",
        "-c",
        f"ROOT, PREBUILT = {str(ROOT)!r}, {prebuilt!r}{RUN}",
    ]
    return subprocess.run(run, env={**os.environ, **env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())))
