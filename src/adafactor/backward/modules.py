"""The modules that FSDP2 wraps: it reduces the gradients of one together, in one order on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from adafactor.core import dtensor


@dataclass(frozen=True, eq=False)
class Wrapped:
    """The parameters of a wrapped module that no inner one has. They step together."""

    params: tuple[Tensor, ...]
    owner: nn.Module  # of the first of them
    attribute: str  # and its name there

    def is_gathered(self) -> bool:
        """Whether the next forward would use a copy that FSDP2 gathered before the step."""
        return getattr(self.owner, self.attribute) is not self.params[0]


def find_wrapped(model: nn.Module) -> list[Wrapped]:
    """Every module of `model` that FSDP2 wraps and that has parameters of its own."""
    if not any(dtensor.is_sharded(p) for p in model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule, fully_shard

    taken: set[Tensor] = set()
    together: dict[int, list[tuple[Tensor, nn.Module, str]]] = {}  # by what `fully_shard([a, b])` has once for both
    for module in reversed([module for module in model.modules() if isinstance(module, FSDPModule)]):
        own = together.setdefault(id(fully_shard.state(module)), [])  # type: ignore[attr-defined]
        for owner in module.modules():
            for name, p in owner.named_parameters(recurse=False):
                if p not in taken and dtensor.is_sharded(p):
                    taken.add(p)
                    own.append((p, owner, name))
    return [Wrapped(tuple(p for p, *_ in own), *own[0][1:]) for own in together.values() if own]
