"""What torchrun starts: `python -m tests.distributed.worker FILE MODULE …` runs the modules' checks on every rank.

A module of checks has a function `checks() -> Iterator[tuple[str, Any]]`, the same on every rank; rank 0 writes down
what they found.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist


def main() -> None:
    """Run them all; the first that fails ends this process, and torchrun ends the others."""
    warnings.filterwarnings("error", module="adafactor")  # torch itself gives some
    torch.set_num_threads(1)
    # a collective that the others never join ends in an error, not in a wait
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results: dict[str, dict[str, Any]] = {}
    try:
        for module in sys.argv[2:]:
            results[module] = dict(importlib.import_module(f"tests.distributed.{module}").checks())
    except BaseException:
        traceback.print_exc()
        end(1)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.barrier()
    end(0)


def end(status: int) -> NoReturn:
    """End this process at once: the ordinary end may wait for the others.

    It may also abort: a thread of gloo that still has a collective's tensors wants Python, which is gone by then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
