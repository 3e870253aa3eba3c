"""Row passes: threads of the library's own for tiles of rows on a CPU, each with one intra-op thread.

PyTorch divides every large operation among its intra-op threads, which spin at a barrier at its end. A row pass is
thousands of such operations, and beside one other busy process each barrier can last a time slice of the scheduler.
Here a thread does all operations of a tile and waits for no other thread until no tile is left.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

MAX_WORKERS = 16  # more would wait for the interpreter lock, which a thread holds between two operations

Item = TypeVar("Item")


class Workers:
    """Threads that divide the items of each `run` among them: ``count`` of them, or the calling thread where that is 1.

    A context manager: threads start with the first items and end with the block, so that calls from several threads
    share nothing and a forked process inherits nothing. In the block the calling thread has one intra-op thread too,
    for the per-row arithmetic between two runs. Thus the bits of a result do not depend on ``count``.

    Args:
        count: number of threads.
        one_intra_op: False leaves the calling thread as it is.
    """

    def __init__(self, count: int, one_intra_op: bool = True) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "offpolicy_corr") if count > 1 else None
        self._intra_op = one_intra_op_thread() if one_intra_op else None

    @classmethod
    def for_tiles(cls, logits: Tensor, num_tiles: int) -> Workers:
        """As many as the calling thread has intra-op threads, at most one per tile and `MAX_WORKERS`.

        The calling thread where no other one can stand in for it: under a dispatch or function mode, which belongs to
        a thread, and for a subclass of Tensor. Off the CPU and while a compiler traces, nothing is changed at all.
        """
        if torch.compiler.is_compiling() or logits.device.type != "cpu" or _thread_setters() is None:
            return cls(1, one_intra_op=False)
        if type(logits) is not Tensor or _a_mode_is_active():
            return cls(1)
        return cls(max(1, min(torch.get_num_threads(), num_tiles, MAX_WORKERS)))

    def __enter__(self) -> Workers:
        if self._intra_op is not None:
            self._intra_op.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._intra_op is not None:
            self._intra_op.__exit__(None, None, None)
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, function: Callable[[int, Item], None], items: Sequence[Item]) -> None:
        """``function(worker, item)`` for every item; ``worker``, below ``count``, is the number of the thread.

        ``function`` writes its results, where no other item does; no graph is recorded. Where items fail, the exception
        of the first of them in ``items`` is raised, whichever thread was faster.
        """
        if self._pool is None or len(items) < 2:
            for item in items:
                function(0, item)
        else:
            self._run_in_pool(self._pool, function, items)

    def _run_in_pool(
        self, pool: ThreadPoolExecutor, function: Callable[[int, Item], None], items: Sequence[Item]
    ) -> None:
        todo = deque(enumerate(items))
        failures: dict[int, BaseException] = {}
        busy: set[int] = set()
        inference = torch.is_inference_mode_enabled()

        def work(worker: int) -> None:
            busy.add(worker)
            try:
                # these modes belong to a thread; so does autocast, which is off here as it is in the caller
                with one_intra_op_thread(), torch.inference_mode(inference), torch.no_grad():
                    for number, item in _taken_from(todo):
                        try:
                            function(worker, item)
                        except BaseException as failure:
                            failures[number] = failure
                            todo.clear()
            finally:
                busy.discard(worker)

        try:
            for future in [pool.submit(work, worker) for worker in range(min(self.count, len(items)))]:
                future.result()
        except BaseException:
            # an interrupt, perhaps amid `submit`; it leaves here when no thread writes into the tensors any more
            todo.clear()
            while busy:
                time.sleep(1e-3)
            raise
        # items begin in order: before an item failed, all that stand in front of it had begun
        if failures:
            raise failures[min(failures)]


def _taken_from(todo: deque[Item]) -> Iterator[Item]:
    """What is left, until other threads have taken the rest."""
    while True:
        try:
            item = todo.popleft()
        except IndexError:
            return
        yield item


@contextmanager
def one_intra_op_thread() -> Iterator[None]:
    """The calling thread's operations run in it alone; no other thread's number changes, not even for a moment.

    ``torch.set_num_threads`` would also set the number that threads started meanwhile take over for good.
    """
    setters = _thread_setters()
    if setters is None:
        yield
        return
    threads = torch.get_num_threads()  # a new thread first has to take over the process's number
    mkl_threads = setters.mkl(1)
    setters.openmp(1)
    try:
        yield
    finally:
        setters.openmp(threads)
        setters.mkl(mkl_threads)


class _ThreadSetters(NamedTuple):
    """What sets the number of intra-op threads of the calling thread; ``mkl`` returns its last one (0: not set)."""

    openmp: Callable[[int], None]
    mkl: Callable[[int], int]


@functools.cache
def _thread_setters() -> _ThreadSetters | None:
    """From the libraries that torch computes with; None where torch does not obey them.

    ``omp_set_num_threads`` sets a variable of the calling thread's own (OpenMP 4.5, section 2.3.2), as does
    ``MKL_Set_Num_Threads_Local``, which takes precedence in MKL.
    """
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        # a handle finds the symbols of what the library was linked with: the same OpenMP, where a process has two
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name), os.RTLD_NOLOAD | os.RTLD_NOW)
        openmp: Any = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    openmp.restype = None
    setters = _ThreadSetters(openmp, getattr(library, "MKL_Set_Num_Threads_Local", lambda _: 0))
    obeyed = []

    def probe() -> None:
        torch.get_num_threads()
        for threads in (2, 1):
            setters.openmp(threads)
            obeyed.append(torch.get_num_threads() == threads)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return setters if all(obeyed) else None


def _a_mode_is_active() -> bool:
    """Whether a dispatch or function mode sees the calling thread's operations; a default device does not count."""
    functions = torch.overrides._get_current_function_mode_stack()
    if any(not isinstance(mode, DeviceContext) for mode in functions):
        return True
    return bool(torch._C._len_torch_dispatch_stack() > 0)
