"""An exception out of a signal handler, as from Ctrl-C: it reaches the caller, and no tensor is left half stepped."""

from __future__ import annotations

import ctypes
import random as dice
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adafactor import Adafactor
from tests.attack.helpers import random, run_python

pytestmark = pytest.mark.many_steps
ROUNDS = 60


class Stop(Exception):
    """What the handler raises."""


class Alarm:
    """A signal after a while, whose handler raises `Stop`."""

    def __init__(self) -> None:
        """Not set yet."""
        self.came = 0
        self._before = signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *_: object) -> None:
        self.came += 1
        raise Stop

    def close(self) -> None:
        """Put the handler back that was there before."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def interrupts(self, action: Callable[[], None], seconds: float) -> bool:
        """Repeat the action until the signal comes; does its exception come out?"""
        before = self.came
        try:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
            while self.came == before:
                action()
        except Stop:
            return True
        return False


@pytest.fixture
def alarm(threads: None) -> Iterator[Alarm]:
    """The number of threads is put back as well."""
    made = Alarm()
    yield made
    made.close()


class Run:
    """Parameters whose gradients depend on nothing but how many steps they have taken."""

    def __init__(self, backend: str, channels_last: bool = True) -> None:
        """A convolution in channels-last order, matrices and a vector."""
        kernel = random((48, 32, 3, 3), 0)
        if channels_last:
            kernel = kernel.contiguous(memory_format=torch.channels_last)
        self.params = [nn.Parameter(kernel)]
        self.params += [nn.Parameter(random(shape, 1)) for shape in ((200, 150), (90, 40), (500,))]
        self.optimizer = Adafactor(self.params, backend=backend, lr_decay=None)
        self.gradients = [[random(tuple(p.shape), i) for i in range(4)] for p in self.params]
        for p in self.params:
            p.grad = torch.empty_like(p)

    def step(self) -> None:
        """One step of every parameter, with the gradient that is due."""
        for p, due in zip(self.params, self.gradients, strict=True):
            assert p.grad is not None
            p.grad.copy_(due[self.count(p) % len(due)])
        self.optimizer.step()

    def count(self, p: nn.Parameter) -> int:
        """Steps that it has taken."""
        return int(self.optimizer.state[p]["step"])

    def everything(self, p: nn.Parameter) -> list[Tensor]:
        """What a step of it changes."""
        return [p.detach().clone(), *(value.clone() for value in self.optimizer.state[p].values())]


@pytest.mark.parametrize("threads_used", [1, 2])
def test_no_tensor_is_left_half_stepped_by_an_interrupt(threads_used: int, backend: str, alarm: Alarm) -> None:
    torch.set_num_threads(threads_used)
    run, undisturbed = Run(backend), Run(backend)
    for each in (run, undisturbed):
        each.step()
        each.step()
    start = time.perf_counter()
    for _ in range(5):
        run.step()
        undisturbed.step()
    one = (time.perf_counter() - start) / 10
    expected = [[undisturbed.everything(p)] for p in undisturbed.params]
    first = undisturbed.count(undisturbed.params[0])
    rolled, torn = dice.Random(0), []
    for _ in range(ROUNDS):
        assert alarm.interrupts(run.step, rolled.random() * 2 * one)
        for p, known in zip(run.params, expected, strict=True):
            while len(known) <= run.count(p) - first:
                undisturbed.step()
                for q, path in zip(undisturbed.params, expected, strict=True):
                    path.append(undisturbed.everything(q))
            due = known[run.count(p) - first]
            if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(run.everything(p), due, strict=True)):
                torn.append(tuple(p.shape))
        if torn:
            break
    assert not torn


@pytest.mark.parametrize("threads_used", [1, 2])
def test_every_exception_of_a_handler_reaches_the_caller(threads_used: int, backend: str, alarm: Alarm) -> None:
    torch.set_num_threads(threads_used)
    params = [nn.Parameter(random((200, 200), i)) for i in range(6)]
    optimizer = Adafactor(params, backend=backend)
    for p in params:
        p.grad = random((200, 200), 9)
    for _ in range(3):
        optimizer.step()
    rolled = dice.Random(0)
    reached = sum(alarm.interrupts(optimizer.step, rolled.random() * 0.01) for _ in range(2 * ROUNDS))
    assert reached == alarm.came == 2 * ROUNDS


class Actions(TorchDispatchMode):
    """Notes at every operation what the system would do with a signal."""

    def __init__(self, number: int) -> None:
        """Nothing is noted yet."""
        super().__init__()
        self.number, self.seen = number, set[bytes]()

    def look(self) -> None:
        """Note it now."""
        action = ctypes.create_string_buffer(1024)
        assert ctypes.CDLL(None).sigaction(self.number, None, action) == 0
        self.seen.add(action.raw[:16] + action.raw[136:140])  # the handler, the signals of its mask, the flags

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Every operation comes here."""
        self.look()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def handled() -> Iterator[int]:
    """A signal with a handler of Python's; the old one is put back."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads glibc's struct sigaction, as it is with 64 bits")
@pytest.mark.parametrize("how", ["Python's", "Python's, which restarts calls", "a C library's"])
def test_what_the_system_does_with_a_signal_stays_as_it_was(how: str, backend: str, handled: int) -> None:
    if how == "Python's, which restarts calls":
        signal.siginterrupt(handled, False)
    if how == "a C library's":
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(handled, ctypes.cast(libc.abs, ctypes.c_void_p))
    run, actions = Run(backend), Actions(handled)
    actions.look()
    run.step()
    actions.look()
    with actions:
        run.optimizer.step()
    assert len(actions.seen) == 1


def count_lost_steps() -> None:
    """In a process with one thread to two (OMP_THREAD_LIMIT): every step that returns has been taken."""
    torch.set_num_threads(2)
    p = nn.Parameter(random((300, 300), 0))
    optimizer = Adafactor([p], backend="cpu")
    p.grad = random((300, 300), 1)
    optimizer.step()
    alarm, rolled, lost, reached = Alarm(), dice.Random(0), [0], 0

    def step() -> None:
        before = int(optimizer.state[p]["step"])
        optimizer.step()
        lost[0] += int(optimizer.state[p]["step"]) != before + 1

    for _ in range(2 * ROUNDS):
        reached += alarm.interrupts(step, rolled.random() * 0.01)
    print(f"{lost[0]} steps lost, {alarm.came - reached} exceptions lost")


def test_every_step_is_taken_with_fewer_threads_than_asked_for() -> None:
    code = "from tests.attack import test_signals; test_signals.count_lost_steps()"
    run = run_python("-c", code, OMP_THREAD_LIMIT="1")
    assert run.stdout.strip() == "0 steps lost, 0 exceptions lost", run.stdout + run.stderr
