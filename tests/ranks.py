"""Ranks that are threads of the test: a check runs on each, and its asserts stand where the values are.

torch's own tests of DTensor and FSDP2 run like this. Threads take turns in Python, so what only processes can show
(a rank that is killed, a launch by torchrun, files of another world size) is tested with processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as threaded

SECONDS = 120  # a rank that waits longer waits for one that will never come


def on_ranks(size: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `check(*arguments)` as each of so many ranks; what they return, or the first failure of any of them."""
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    store = c10d.HashStore()
    isolate: Any = getattr(c10d, "_set_thread_isolation_mode")  # noqa: B009 -- torch's stubs lack it

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            results[rank] = check(*arguments)
        except BaseException as failure:
            failures.append((rank, failure))
            threaded.ProcessLocalGroup.exception_handle(failure)  # wakes those that wait for this rank
        finally:
            dist.destroy_process_group()

    isolate(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        waiting = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    for rank, failure in failures:
        if not isinstance(failure, SystemExit):  # how the others end when one has failed
            failure.add_note(f"on rank {rank} of {size}")
            raise failure
    assert not waiting, f"ranks {waiting} still wait for the others"
    return results
