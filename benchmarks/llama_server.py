"""`llama-server` for a Python with xllamacpp, a wheel with llama.cpp's server: the options that `assisted handover` writes.

    python benchmarks/llama_server.py --model target.gguf --spec-type ngram-simple ... --port 8080

For the case `handover`, where no llama-server has been built. Unknown options are errors, as in llama-server.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLAGS = ("--metrics", "--offline")


def parameters(words: Sequence[str]) -> Any:
    """llama.cpp's parameters for the words of a command line. Raises ValueError for an option that is not known here."""
    import xllamacpp

    def of(kind: Any, prefix: str) -> dict[str, Any]:
        return {
            name.removeprefix(prefix).lower().replace("_", "-"): getattr(kind, name)
            for name in dir(kind)
            if name.startswith(prefix)
        }

    types = of(xllamacpp.ggml_type, "GGML_TYPE_")
    flash = of(xllamacpp.llama_flash_attn_type, "LLAMA_FLASH_ATTN_TYPE_")
    methods = of(xllamacpp.common_speculative_type, "COMMON_SPECULATIVE_TYPE_")
    found = xllamacpp.CommonParams()
    draft, simple = found.speculative.draft, found.speculative.ngram_simple
    known = {
        "--model": (found.model, "path", str),
        "--spec-draft-model": (draft.mparams, "path", str),
        "--spec-type": (found.speculative, "types", lambda name: [methods[name]]),
        "--spec-draft-n-max": (draft, "n_max", int),
        "--spec-draft-ngl": (draft, "n_gpu_layers", lambda count: -2 if count == "all" else int(count)),
        "--spec-ngram-simple-size-n": (simple, "size_n", int),
        "--spec-ngram-simple-size-m": (simple, "size_m", int),
        "--flash-attn": (found, "flash_attn_type", lambda name: flash[{"on": "enabled", "off": "disabled"}[name]]),
        "--cache-type-k": (found, "cache_type_k", types.__getitem__),
        "--cache-type-v": (found, "cache_type_v", types.__getitem__),
        "--cache-type-k-draft": (draft, "cache_type_k", types.__getitem__),
        "--cache-type-v-draft": (draft, "cache_type_v", types.__getitem__),
        "--host": (found, "hostnames", lambda name: [name]),
        "--port": (found, "port", int),
        "--parallel": (found, "n_parallel", int),
        "--threads": (found.cpuparams, "n_threads", int),
        "--threads-batch": (found.cpuparams_batch, "n_threads", int),
        "--ctx-size": (found, "n_ctx", int),
    }
    found.endpoint_metrics = "--metrics" in words
    rest = [word for word in words if word not in FLAGS]
    for name, value in zip(rest[::2], rest[1::2], strict=True):
        if name not in known:
            raise ValueError(f"{name} is not known here; one of {', '.join((*known, *FLAGS))}")
        place, field, read = known[name]
        setattr(place, field, read(value))
    return found


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"version: xllamacpp {version('xllamacpp')}")
        return
    import xllamacpp

    found = parameters(sys.argv[1:])
    for model in (found.model.path, found.speculative.draft.mparams.path):
        if model and not Path(model).is_file():
            raise FileNotFoundError(model)
    server = xllamacpp.Server(found)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
