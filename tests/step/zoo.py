"""Twenty architectures of transformers and diffusers: what is factored of them, and what the state takes.

Each is there twice: with the sizes of its configuration's defaults, without weights, for what docs/plan.md says; and
tiny, to be trained for ten steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from adafactor import plan
from adafactor.core import state as states
from adafactor.core.factoring import Factored
from adafactor.core.settings import Settings

WORDS: Mapping[str, tuple[int, ...]] = {"input_ids": (2, 7)}
IMAGE = {"pixel_values": (2, 3, 32, 32)}
SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GROUPED = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Animal:
    """An architecture: its class, and what makes a tiny one of it and feeds that."""

    kind: str
    model: str  # the class; of transformers its configuration is found by it
    tiny: Mapping[str, Any]
    inputs: Mapping[str, tuple[int, ...]]
    usual: Mapping[str, Any] = field(default_factory=dict)  # where the defaults are of no size that is used
    package: str = "transformers"

    def build(self, tiny: bool) -> nn.Module:
        """Make the model; on the meta device, if that is the present one, without weights."""
        package = importlib.import_module(self.package)
        make, sizes = getattr(package, self.model), self.tiny if tiny else self.usual
        if self.package == "transformers":
            config = make.config_class(**sizes)
            model: nn.Module = make(config)
        else:
            model = make(**sizes)
        return model

    def feed(self, model: nn.Module) -> Tensor:
        """The loss of random inputs: the mean square of all that comes out."""
        inputs: dict[str, Tensor] = {}
        for name, shape in self.inputs.items():
            is_index = name.endswith("ids") and self.package == "transformers" or name == "class_labels"
            inputs[name] = torch.randint(3, 9, shape) if is_index else torch.randn(shape)
        out = model(**inputs)
        found = [t for t in _tensors(out) if t.is_floating_point() and t.requires_grad]
        return torch.stack([t.float().square().mean() for t in found]).sum()


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (list, tuple, dict)):
        for each in out.values() if isinstance(out, dict) else out:
            yield from _tensors(each)
    elif hasattr(out, "latent_dist"):
        yield out.latent_dist.parameters


ZOO = {
    "GPT-2": Animal("decoder", "GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}, WORDS),
    "Llama": Animal("decoder", "LlamaForCausalLM", GROUPED, WORDS),
    "Qwen3": Animal("decoder", "Qwen3ForCausalLM", GROUPED, WORDS),
    "Gemma 2": Animal("decoder, tied", "Gemma2ForCausalLM", GROUPED, WORDS),
    "Mixtral": Animal("experts", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, WORDS),
    "Qwen3 MoE": Animal(
        "experts",
        "Qwen3MoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        WORDS,
    ),
    "T5": Animal(
        "encoder-decoder",
        "T5ForConditionalGeneration",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        {**WORDS, "decoder_input_ids": (2, 5)},
    ),
    "BART": Animal(
        "encoder-decoder",
        "BartForConditionalGeneration",
        {
            **{"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24},
            **{"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        },
        {**WORDS, "decoder_input_ids": (2, 5)},
    ),
    "BERT": Animal("encoder", "BertModel", SMALL, WORDS),
    "Mamba": Animal(
        "state space", "MambaForCausalLM", {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}, WORDS
    ),
    "RecurrentGemma": Animal(
        "recurrent",
        "RecurrentGemmaForCausalLM",
        {**GROUPED, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8},
        WORDS,
    ),
    "ViT": Animal("vision", "ViTModel", {**SMALL, "image_size": 32, "patch_size": 8}, IMAGE),
    "ConvNeXt": Animal(
        "vision, convolutions", "ConvNextModel", {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}, IMAGE
    ),
    "ResNet": Animal(
        "vision, convolutions", "ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, IMAGE
    ),
    "Swin": Animal(
        "vision, windows",
        "SwinModel",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        IMAGE,
    ),
    "VideoMAE": Animal(
        "video, 3-d convolution",
        "VideoMAEModel",
        {**{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 16, "patch_size": 8, "num_frames": 4},
        {"pixel_values": (2, 4, 3, 16, 16)},
    ),
    "Whisper": Animal(
        "speech, 1-d convolutions",
        "WhisperModel",
        {
            **{"vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24},
            **{"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
            **{"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 10},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
        {"input_features": (2, 8, 20), "decoder_input_ids": (2, 5)},
    ),
    "Wav2Vec2": Animal(
        "speech, weight norm",
        "Wav2Vec2Model",
        {
            **{**SMALL, "conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)},
            **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
        },
        {"input_values": (2, 400)},
    ),
    "Stable Diffusion's UNet": Animal(
        "diffusion, convolutions",
        "UNet2DConditionModel",
        {
            **{"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 8, "norm_num_groups": 4},
            **{"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": 4},
            **{"up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "sample_size": 8},
        },
        {"sample": (2, 4, 8, 8), "timestep": (2,), "encoder_hidden_states": (2, 5, 8)},
        package="diffusers",
    ),
    "a video UNet": Animal(
        "diffusion, 3-d convolutions",
        "UNet3DConditionModel",
        {
            **{"block_out_channels": (8, 16), "layers_per_block": 1, "cross_attention_dim": 8, "norm_num_groups": 4},
            **{"down_block_types": ("DownBlock3D", "CrossAttnDownBlock3D"), "attention_head_dim": 4},
            **{"up_block_types": ("CrossAttnUpBlock3D", "UpBlock3D"), "sample_size": 8},
        },
        {"sample": (1, 4, 3, 8, 8), "timestep": (1,), "encoder_hidden_states": (1, 5, 8)},
        package="diffusers",
    ),
    "FLUX": Animal(
        "diffusion transformer",
        "FluxTransformer2DModel",
        {
            **{"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8},
            **{"num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8},
            "axes_dims_rope": (2, 2, 4),
        },
        {
            **{"hidden_states": (1, 4, 4), "encoder_hidden_states": (1, 3, 8), "pooled_projections": (1, 8)},
            **{"timestep": (1,), "img_ids": (4, 3), "txt_ids": (3, 3)},
        },
        package="diffusers",
    ),
    "DiT": Animal(
        "diffusion transformer",
        "DiTTransformer2DModel",
        {
            **{"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "in_channels": 4},
            **{"out_channels": 8, "norm_num_groups": 4, "patch_size": 2},
        },
        {"hidden_states": (2, 4, 8, 8), "timestep": (2,), "class_labels": (2,)},
        package="diffusers",
    ),
}


def saving(name: str) -> tuple[float, float]:
    """The share of an architecture of its usual size that is factored, and AdamW's state in multiples of ours."""
    with torch.device("meta"):
        model = ZOO[name].build(tiny=False)
    count = sum(p.numel() for p in model.parameters())
    factored = [p for p in model.parameters() if isinstance(states.factoring_of(p, Settings()), Factored)]
    size = plan(model, device="cpu").line("adafactor-float32").bytes
    assert size is not None
    return sum(p.numel() for p in factored) / count, 8 * count / size.optimizer
