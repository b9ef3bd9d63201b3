"""What a card holds and how fast it reads: the manufacturers' figures."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ...core.host import free_memory

GB = 10**9


@dataclass(frozen=True)
class Device:
    """Where a pair runs. Bandwidths are in bytes per second, at least and at most."""

    name: str  # for the reader
    kind: str  # "cuda" or "cpu"
    memory: int  # bytes that are free
    bandwidth: tuple[float, float]  # of its memory
    bus: tuple[float, float] = (6e9, 25e9)  # from main memory: PCIe 3.0 pageable to 4.0 pinned
    fp8: bool = True  # it multiplies in FP8 (compute capability 8.9); for others, transformers unpacks such weights


# Memory in GB and bandwidth in GB/s, from the data sheets of NVIDIA; those of the Ti and Super cards are listed in
# Nvidia_GPU_Specification.md of https://github.com/CYBIRD-D/How-to-Choose-your-LLM-Model-for-translation (November 2026).
CARDS = {
    "RTX 3060": (12, 360),
    "RTX 3060 Ti": (8, 448),
    "RTX 3070": (8, 448),
    "RTX 3080": (10, 760),
    "RTX 3080 Ti": (12, 912),
    "RTX 3090": (24, 936),
    "RTX 4060": (8, 272),
    "RTX 4060 Ti": (8, 288),
    "RTX 4060 Ti 16GB": (16, 288),
    "RTX 4070": (12, 504),
    "RTX 4070 Super": (12, 504),
    "RTX 4070 Ti": (12, 504),
    "RTX 4070 Ti Super": (16, 672),
    "RTX 4080": (16, 717),
    "RTX 4080 Super": (16, 736),
    "RTX 4090": (24, 1008),
    "RTX 5070": (12, 672),
    "RTX 5080": (16, 960),
    "RTX 5090": (32, 1792),
    "T4": (16, 320),
    "L4": (24, 300),
    "A10": (24, 600),
    "A100 40GB": (40, 1555),
    "A100 80GB": (80, 2039),
    "H100": (80, 3350),
    "H200": (141, 4800),
}
_BEFORE_FP8 = ("RTX 30", "T4", "A10")  # A100 included
_REACHED = (0.55, 0.9)  # of a data sheet's bandwidth, by passes over one token
_UNKNOWN = (250e9, 1000e9)  # cards of 8 to 24 GB
_HOST = (15e9, 80e9)  # main memory, two channels
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def bytes_of(text: str | int) -> int:
    """A number of bytes: 12GB (10**9 each), 11.6GiB (2**30 each), or "12", which is 12GB. Raises ValueError for others."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    unit = None if found is None else "g" if found[0].strip() == found[1] else found[2]
    size = int(float(found[1]) * _UNITS[unit]) if found and unit in _UNITS else 0
    if size < 1:
        raise ValueError(f"memory: {text!r} is not a size; write it as 12GB or 11.6GiB")
    return size


def card(name: str | None, memory: int | None) -> Device:
    """A card by name, or any card of a size. Raises ValueError for a name that is not in `CARDS`."""
    if name is None:
        assert memory is not None
        return Device(f"a card of {memory / GB:.3g} GB", "cuda", memory, _UNKNOWN)
    key = {_short(key): key for key in CARDS}.get(_short(name))
    if key is None:
        raise ValueError(f"card: {name!r} is not in the list ({', '.join(CARDS)}); give --vram instead")
    size, rate = CARDS[key]
    low, high = (share * rate * 1e9 for share in _REACHED)
    return Device(key, "cuda", memory or size * GB, (low, high), fp8=not key.startswith(_BEFORE_FP8))


def _short(name: str) -> str:
    """A card's name without its maker and series: "4070" for "NVIDIA GeForce RTX 4070"."""
    return re.sub(r"nvidia|geforce|rtx|[\s_-]", "", name.lower())


def here(kind: str | None = None) -> Device:
    """This machine's accelerator, or its main memory where it has none or `kind` is "cpu"."""
    if kind != "cpu" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        match = max((key for key in CARDS if _short(key) in _short(name)), key=len, default=None)
        bandwidth = card(match, free).bandwidth if match else _UNKNOWN
        return Device(name, "cuda", free, bandwidth, fp8=torch.cuda.get_device_capability() >= (8, 9))
    if kind == "cuda":
        raise ValueError("device: there is no CUDA device here; name a card or give its memory")
    return Device("this machine's main memory", "cpu", free_memory(), _HOST, fp8=False)
