"""Tiny random models that read images, one per family, and prompts with a picture in each row.

Each entry knows its config and what its processor would make of a picture. Nothing here knows about drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from architectures import DELTA, LINEAR_LAYERS, MIXED_LAYERS, SPECIAL, UNTIED, VOCABULARY, _spread
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

IMAGE, START, VIDEO = VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3
TEXT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, **UNTIED, **SPECIAL},
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = VISION | {"image_size": 8, "patch_size": 4}  # four patches
QWEN = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "temporal_patch_size": 1, "spatial_merge_size": 2,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": 5}


@dataclass(frozen=True)
class Family:
    """Models that read images.

    Args:
        name: the config's model type.
        fields: of the config.
        pixels: what the processor makes of one picture for each of some rows: the tensors, given their number.
        tokens: placeholders for a picture.
        types: the argument that says which tokens are a picture's, if any.
    """

    name: str
    fields: dict[str, Any]
    pixels: Callable[[int], dict[str, torch.Tensor]]
    tokens: int = 4
    types: str | None = None

    def build(self, seed: int = 0) -> PreTrainedModel:
        """A float32 model in eval mode whose pictures matter."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[self.name](**self.fields))
        _spread(model, torch.Generator().manual_seed(seed))
        return model.float().eval()

    def inputs(self, rows: int = 1, seed: int = 1, padded: bool = True) -> dict[str, torch.Tensor]:
        """What a processor returns for a batch: some text, a picture, some text; all rows but the first padded on the left."""
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(6, 90, (rows, 14 + self.tokens), generator=draw)
        ids[:, 7], ids[:, 8 : 8 + self.tokens] = START, IMAGE
        mask = torch.ones_like(ids)
        for row in range(rows if padded else 0):
            mask[row, : 2 * row] = 0
        ids = ids.where(mask.bool(), SPECIAL["pad_token_id"])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = {"input_ids": ids, "attention_mask": mask, **self.pixels(rows)}
        return found if self.types is None else found | {self.types: (ids == IMAGE).long()}


def _picture(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 8, 8)}


def _gemma4_patches(rows: int) -> dict[str, torch.Tensor]:
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)
    return {"pixel_values": torch.rand(rows, 16, 48), "image_position_ids": places.expand(rows, -1, -1)}


def _qwen_patches(rows: int) -> dict[str, torch.Tensor]:
    grid = torch.tensor([[1, 4, 8]]).expand(rows, -1)  # eight tokens in two lines take four positions
    return {"pixel_values": torch.randn(rows * 32, 48), "image_grid_thw": grid}


def _qwen(name: str, vision: dict[str, Any], **text: Any) -> Family:
    fields = {"text_config": TEXT | SECTIONS | text, "vision_config": QWEN | vision, **QWEN_IDS}
    return Family(name, fields, _qwen_patches, 8, "mm_token_type_ids")


FAMILIES = [
    Family(
        "gemma3",
        {
            "text_config": TEXT | MIXED_LAYERS,
            "vision_config": SMALL,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
        }
        | UNTIED,
        _picture,
        types="token_type_ids",
    ),
    Family(
        "gemma4",
        {
            "text_config": TEXT
            | MIXED_LAYERS
            | {"hidden_size_per_layer_input": 0, "global_head_dim": 16}
            | {"use_bidirectional_attention": "vision"},
            "vision_config": VISION
            | {"head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2, "patch_size": 4},
            "audio_config": None,
            "image_token_id": IMAGE,
        }
        | UNTIED,
        _gemma4_patches,
        types="mm_token_type_ids",
    ),
    _qwen("qwen2_vl", {"embed_dim": 16, "mlp_ratio": 1, "hidden_size": 32}),
    _qwen("qwen2_5_vl", {"window_size": 16, "fullatt_block_indexes": [0]}),
    _qwen("qwen3_vl", {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}),
    _qwen("qwen3_5", {"num_position_embeddings": 64}, **LINEAR_LAYERS, **DELTA),
    Family(
        "smolvlm",
        {"text_config": TEXT | {"model_type": "llama"}, "vision_config": SMALL | {"image_size": 16}, "scale_factor": 2}
        | {"image_token_id": IMAGE},
        lambda rows: {"pixel_values": torch.randn(rows, 1, 3, 16, 16)},
    ),
    Family(
        "llava",
        {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SMALL | {"model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
        _picture,
    ),
    Family(
        "mistral3",
        {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None, "rope_parameters": ROPE},
            "vision_config": VISION | {"model_type": "pixtral", "image_size": 16, "patch_size": 4, "head_dim": 8},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
        }
        | UNTIED,
        lambda rows: {
            "pixel_values": torch.randn(rows, 3, 16, 16),
            "image_sizes": torch.tensor([[16, 16]]).expand(rows, -1),
        },
    ),
]
FAMILIES = [family for family in FAMILIES if family.name in CONFIG_MAPPING]
BY_NAME = {family.name: family for family in FAMILIES}
