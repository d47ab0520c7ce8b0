"""What `adafactor plan` says of four models that people want on one card: the table of docs/backward.md.

python -m studies.one_card    # needs transformers and diffusers, for the shapes of Qwen3, FLUX and SDXL
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from adafactor.planning import SETTINGS
from adafactor.planning.memory import Situation, line_of
from adafactor.planning.models import find

ROWS = {  # the setting, and the rank of LoRA
    "AdamW, mixed precision": (SETTINGS["adamw-mixed"], 0),
    "AdamW 8-bit, bfloat16": (SETTINGS["adamw-8bit-bfloat16"], 0),
    "adafactor, bfloat16, stochastic": (SETTINGS["adafactor-stochastic"], 0),
    "LoRA of rank 16, adafactor": (SETTINGS["adafactor-stochastic"], 16),
    "**adafactor, bfloat16, stochastic, in backward**": (SETTINGS["adafactor-backward"], 0),
    "the same, int8 momentum": (replace(SETTINGS["adafactor-stochastic-momentum-int8"], in_backward=True), 0),
}


def qwen3_8b() -> torch.nn.Module:
    """Qwen3 8B by the sizes of its configuration."""
    transformers = importlib.import_module("transformers")
    sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = transformers.Qwen3Config(vocab_size=151936, tie_word_embeddings=False, **sizes, **heads)
    model: torch.nn.Module = transformers.Qwen3ForCausalLM(config)
    return model


def flux() -> torch.nn.Module:
    """FLUX.1's transformer: diffusers' default sizes are its own."""
    model: torch.nn.Module = importlib.import_module("diffusers").FluxTransformer2DModel(guidance_embeds=True)
    return model


def sdxl() -> torch.nn.Module:
    """SDXL's UNet by the sizes of its configuration."""
    down = ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")
    model: torch.nn.Module = importlib.import_module("diffusers").UNet2DConditionModel(
        block_out_channels=(320, 640, 1280),
        down_block_types=down,
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(5, 10, 20),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    return model


def rows() -> Iterator[list[str]]:
    """The header, then a row for each setting: GiB, all but activations."""
    models: dict[str, torch.nn.Module | str] = {"Llama 3.1 8B": "llama-8b"}
    with torch.device("meta"):
        models |= {"Qwen3 8B": qwen3_8b(), "FLUX.1 12B": flux(), "SDXL 2.6B": sdxl()}
    yield ["GiB", *models]
    for name, (setting, rank) in ROWS.items():
        situation = Situation("cuda", lora=rank)
        found = [find(model).with_lora(rank) if rank else find(model) for model in models.values()]
        counted = [line_of(model, setting, situation).bytes for model in found]
        yield [name, *(f"{each.total / 2**30:.1f}" for each in counted if each is not None)]


def main() -> None:
    """Print the table."""
    header, *lines = rows()
    print("\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)))


if __name__ == "__main__":
    main()
