"""Known models as lists of shapes, in the order in which transformers has their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from adafactor.shapes import Shape, bert, gpt2, llama, t5


@dataclass(frozen=True)
class Preset:
    """A model from shapes alone. The first is that of the token embedding."""

    title: str
    build: Callable[[], Iterable[Shape]]
    embedded: int = 1  # in how many places the token embedding is used; 2 where it is the output layer too

    @property
    def shapes(self) -> list[Shape]:
        """Of all parameters, a tied one once."""
        return list(self.build())


PRESETS = {
    "gpt2": Preset("GPT-2", partial(gpt2, 12, 768), 2),
    "gpt2-medium": Preset("GPT-2 medium", partial(gpt2, 24, 1024), 2),
    "gpt2-large": Preset("GPT-2 large", partial(gpt2, 36, 1280), 2),
    "gpt2-xl": Preset("GPT-2 XL", partial(gpt2, 48, 1600), 2),
    "bert-base": Preset("BERT base, uncased", partial(bert, 12, 768)),
    "bert-large": Preset("BERT large, uncased", partial(bert, 24, 1024)),
    "t5-small": Preset("T5 small", partial(t5, 6, 512, 2048, 8), 3),
    "t5-base": Preset("T5 base", partial(t5, 12, 768, 3072, 12), 3),
    "t5-large": Preset("T5 large", partial(t5, 24, 1024, 4096, 16), 3),
    "t5-3b": Preset("T5 3B", partial(t5, 24, 1024, 16384, 32, 128), 3),
    "t5-11b": Preset("T5 11B", partial(t5, 24, 1024, 65536, 128, 128), 3),
    "llama-1b": Preset("Llama 3.2 1B", partial(llama, 16, 2048, 8192, 512, 128256, True), 2),
    "llama-3b": Preset("Llama 3.2 3B", partial(llama, 28, 3072, 8192, 1024, 128256, True), 2),
    "llama-7b": Preset("Llama 2 7B", partial(llama, 32, 4096, 11008, 4096, 32000, False)),
    "llama-8b": Preset("Llama 3 8B", partial(llama, 32, 4096, 14336, 1024, 128256, False)),
    "llama-13b": Preset("Llama 2 13B", partial(llama, 40, 5120, 13824, 5120, 32000, False)),
    "llama-70b": Preset("Llama 3 70B", partial(llama, 80, 8192, 28672, 1024, 128256, False)),
    "mistral-7b": Preset("Mistral 7B", partial(llama, 32, 4096, 14336, 1024, 32000, False)),
}
