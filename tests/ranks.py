"""Ranks that are threads of the test: a check runs on each, and its asserts stand where the values are.

torch's own tests of DTensor and FSDP2 run like this. Threads take turns in Python, so what only processes can show
(a rank that is killed, a launch by torchrun) is tested with processes.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as threaded

SECONDS = 120  # a rank that waits longer waits for one that will never come


class Worker(threading.Thread):
    """Does one thing after the other, for as long as there are tests."""

    def __init__(self) -> None:
        """Wait for the first."""
        super().__init__(daemon=True)
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Do what comes."""
        while True:
            self.tasks.get()()


@functools.cache
def workers(size: int) -> list[Worker]:
    """A thread for each rank of so many, always the same one.

    torch remembers by thread what it found out about a mesh, and some of that is of one rank only. Of a thread that has
    ended the next one has the number.
    """
    return [Worker() for _ in range(size)]


def on_ranks(size: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `check(*arguments)` as each of so many ranks; what they return, or the first failure of any of them."""
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
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
            ended.put(rank)

    isolate(True)
    threaded._install_threaded_pg()
    waiting = set(range(size))
    try:
        for rank, worker in enumerate(workers(size)):
            worker.tasks.put(functools.partial(run, rank))
        while waiting:
            waiting.remove(ended.get(timeout=SECONDS))
    except queue.Empty:
        workers.cache_clear()  # of these, some will not come back
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    for rank, failure in failures:
        if not isinstance(failure, SystemExit):  # how the others end when one has failed
            failure.add_note(f"on rank {rank} of {size}")
            raise failure
    assert not waiting, f"ranks {sorted(waiting)} still wait for the others"
    return results
