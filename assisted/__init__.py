"""assisted: Hugging Face models answer faster on the machine you have, without changing one token. Speculative decoding."""

from . import acceptance, lengths, report, zoo
from .configuration import AssistedConfig
from .drafters import (
    Combined,
    DraftModel,
    Eagle,
    EarlyExit,
    LayerSkip,
    Medusa,
    Merged,
    NGram,
    QuantizedSelf,
    Suffix,
    TokenRecycling,
)
from .lossy import LossyTypical
from .modeling import AssistedModelForCausalLM

__all__ = [
    "AssistedConfig",
    "AssistedModelForCausalLM",
    "Combined",
    "DraftModel",
    "Eagle",
    "EarlyExit",
    "LayerSkip",
    "LossyTypical",
    "Medusa",
    "Merged",
    "NGram",
    "QuantizedSelf",
    "Suffix",
    "TokenRecycling",
    "acceptance",
    "lengths",
    "report",
    "zoo",
]
__version__ = "0.1.0"
