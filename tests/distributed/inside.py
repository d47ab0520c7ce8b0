"""The diagnostics of a sharded run: what every rank is told, and that it is what one process is told."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from adafactor import Adafactor
from adafactor.diagnostics import Report, Watch, diagnose
from tests.distributed.models import Net, batches, fsdp
from tests.distributed.placements import everywhere

KEYWORDS = {"relative": {}, "absolute": {"relative": False, "lr": 0.5, "lr_decay": None}}


def told(model: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
    """Figures of the last report, and words."""
    optimizer = Adafactor(model.named_parameters(), **keywords)
    history: list[Report] = []
    with Watch(optimizer, history.append, every=2):
        for ids in batches():
            optimizer.zero_grad()
            model(ids).mean().backward()
            optimizer.step()
    figures = ("rms_update", "step_size", "relative_change", "rms_parameter", "clip_rate", "steps")
    return {
        "records": [{name: getattr(record, name) for name in figures} for record in history[-1]],
        "words": [(finding.kind, finding.parameters) for finding in diagnose(history)],
    }


def checks() -> Iterator[tuple[str, Any]]:
    """For each kind of step: one process, and every rank of a sharded run."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for name, keywords in KEYWORDS.items():
        torch.manual_seed(0)
        plain = Net().double()
        sharded = fsdp(mesh)(copy.deepcopy(plain))
        yield name, {"alone": told(plain, keywords), "ranks": everywhere(told(sharded, keywords))}
