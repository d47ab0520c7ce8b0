"""Architectures of transformers and diffusers, in the sizes of their defaults and without weights: what is factored."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from adafactor import plan
from adafactor.core import state as states
from adafactor.core.factoring import Factored
from adafactor.core.settings import Settings

ZOO = {
    **{"GPT-2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Qwen3": "Qwen3ForCausalLM"},
    **{"Gemma 2": "Gemma2ForCausalLM", "Mixtral": "MixtralForCausalLM", "Qwen3 MoE": "Qwen3MoeForCausalLM"},
    **{"T5": "T5ForConditionalGeneration", "BART": "BartForConditionalGeneration", "BERT": "BertModel"},
    **{"Mamba": "MambaForCausalLM", "RecurrentGemma": "RecurrentGemmaForCausalLM", "ViT": "ViTModel"},
    **{"ConvNeXt": "ConvNextModel", "ResNet": "ResNetModel", "Swin": "SwinModel", "VideoMAE": "VideoMAEModel"},
    **{"Whisper": "WhisperModel", "Wav2Vec2": "Wav2Vec2Model", "Stable Diffusion's UNet": "UNet2DConditionModel"},
    **{"a video UNet": "UNet3DConditionModel", "FLUX": "FluxTransformer2DModel", "DiT": "DiTTransformer2DModel"},
}
DIFFUSERS = ("Stable Diffusion's UNet", "a video UNet", "FLUX", "DiT")
FAST = ("GPT-2", "ConvNeXt", "Mixtral")
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages


def saving(name: str) -> tuple[float, float]:
    """The share of an architecture that is factored, and AdamW's state in multiples of ours."""
    package = "diffusers" if name in DIFFUSERS else "transformers"
    pytest.importorskip(package)
    make = getattr(importlib.import_module(package), ZOO[name])
    with torch.device("meta"):
        model = make() if package == "diffusers" else make(make.config_class())
    count = sum(p.numel() for p in model.parameters())
    factored = [p for p in model.parameters() if isinstance(states.factoring_of(p, Settings()), Factored)]
    size = plan(model, device="cpu").line("adafactor-float32").bytes
    assert size is not None
    return sum(p.numel() for p in factored) / count, 8 * count / size.optimizer


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
def test_what_the_page_says_is_factored_of_all_is_so_of_each(name: str) -> None:
    text = PAGE.read_text().split("## Is every weight factored?")[1].split("\n## ")[0]
    share, times = saving(name)
    assert name in " ".join(text.split()) and "more than 99.7 %" in text and "286 times (ResNet) to 6,473" in text
    assert share > 0.997 and 286 <= round(times) <= 6473
