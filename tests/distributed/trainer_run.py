"""transformers' Trainer on several ranks: `… trainer_run SHARDING WAY FOLDER LOAD`, under torchrun, prints losses.

SHARDING is DDP or what FSDP2's checkpoint is to be (SHARDED_STATE_DICT, FULL_STATE_DICT); WAY is to step "after"
backward, "inside" it, or inside it by "run": `adafactor run --step-in-backward` with transformers' own Adafactor.

Accelerate 1.15 has FSDP2 on no CPU: `AcceleratorState.__init__` goes into it for kinds of GPUs that it lists, and goes
on with DDP, without a word, for all else. What it does once it is in there works on CPUs too, so this opens that gate.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from adafactor.cli.run import replace  # noqa: E402
from adafactor.trainers import FromModel  # noqa: E402

STEPS, SAVE_AFTER, BATCH, ACCUMULATE, WORDS = 4, 2, 8, 2, 16


def open_gate() -> None:
    """Let Accelerate shard a model on CPUs as on GPUs."""
    init = AcceleratorState.__init__

    def opened(self: Any, *args: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as the end of `init` does

    AcceleratorState.__init__ = opened


def arguments(sharding: str, folder: str) -> dict[str, Any]:
    """The same eight sentences to a step on any number of ranks."""
    layers = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": sharding}
    return {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "save_steps": SAVE_AFTER,
        "logging_steps": 1,
        "per_device_train_batch_size": BATCH // ACCUMULATE // dist.get_world_size(),
        "gradient_accumulation_steps": ACCUMULATE,
        "max_grad_norm": 1e9,
        "learning_rate": 0.1,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        **({} if sharding == "DDP" else {"fsdp": True, "fsdp_config": layers}),
    }


def trainer(sharding: str, way: str, folder: str) -> Any:
    """A tiny GPT-2 without dropout, whose bits depend on the ranks' random numbers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": 9, "n_embd": 8, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends))
    tokens = torch.randint(WORDS, (32, 9), generator=torch.Generator().manual_seed(0))
    given = arguments(sharding, folder)
    how: dict[str, Any] = {}
    if way == "run":
        replace({"beta1": 0.9, "relative_step": False}, in_backward=True)
        given["optim"] = "adafactor"
    else:
        keywords = {"lr": 0.1, "lr_decay": None, "relative": False, "beta1": 0.9}
        inside = {"step_in_backward": True, "max_norm": float("inf")} if way == "inside" else {}
        given["max_grad_norm"] = 0.0 if inside else given["max_grad_norm"]
        how = {"optimizer_cls_and_kwargs": (FromModel, {**keywords, **inside})}
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(model=model, args=TrainingArguments(**given), train_dataset=rows, **how)


def main() -> None:
    """Train, from a checkpoint if one is given."""
    sharding, way, folder, load = sys.argv[1:]
    dist.init_process_group("gloo")
    open_gate()
    made = trainer(sharding, way, folder)
    made.train(resume_from_checkpoint=None if load == "-" else load)
    weights = [p.detach() for p in made.model.parameters()]
    result = {
        "kind": type(made.model_wrapped).__name__,
        "losses": [entry["loss"] for entry in made.state.log_history if "loss" in entry],
        "weights": [(p.full_tensor() if isinstance(p, DTensor) else p).double().square().sum().item() for p in weights],
        "in backward": "grad_norm" in made.optimizer.param_groups[0],
    }
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(result), flush=True)
    dist.barrier()
    # Not through the ordinary end: DDP's reducer takes gloo's group down while it holds the GIL, and gloo's thread may
    # wait for that to free a tensor of the last collective (seen with torch 2.13)
    os._exit(0)


if __name__ == "__main__":
    main()
