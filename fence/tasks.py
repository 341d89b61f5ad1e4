"""Tasks that belong to the fence and not to who asked for them, on asyncio and on trio.

A task group held open between `__aenter__` and `__aexit__` would tie the fence to one task. An
owned task is started on the event loop itself, keeps its outcome for whoever looks, and lets no
error escape unobserved. All times are seconds (float) on the event loop's clock.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

if TYPE_CHECKING:
    import trio

T = TypeVar("T")

log = logging.getLogger("fence")


class Home:
    """One event loop, as the place where owned tasks run."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        token: trio.lowlevel.TrioToken | None,
    ) -> None:
        self._loop = loop
        self._token = token
        self._context = contextvars.copy_context()

    @classmethod
    def current(cls) -> Home:
        """Return the running event loop.

        Raises:
            RuntimeError: called from outside asyncio and trio.
        """
        # trio first: in guest mode it runs on top of an asyncio loop.
        if _in_trio():
            import trio

            return cls(None, trio.lowlevel.current_trio_token())
        return cls(asyncio.get_running_loop(), None)

    def is_current(self) -> bool:
        """Whether the calling code runs on this event loop."""
        if self._token is not None:
            if not _in_trio():
                return False
            import trio

            return trio.lowlevel.current_trio_token() is self._token
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def is_alive(self) -> bool:
        """Whether something can still run here; a loop that is stopped for now counts as dead."""
        if self._token is not None:
            try:
                self._token.run_sync_soon(_nothing)
            except RuntimeError:  # trio.RunFinishedError
                return False
            return True
        assert self._loop is not None
        return self._loop.is_running() and not self._loop.is_closed()

    def now(self) -> float:
        """Return the event loop's clock; call it on this loop only."""
        if self._loop is not None:
            return self._loop.time()
        import trio

        return trio.current_time()

    def call_soon(self, callback: Callable[[], object]) -> bool:
        """Run `callback` on this loop soon. Any thread, also a signal handler.

        Returns False where the loop is over: the callback will not run.
        """
        try:
            if self._token is not None:
                self._token.run_sync_soon(callback)
            else:
                assert self._loop is not None
                # Not the context of the calling thread: it may belong to another event loop,
                # and anyio would take that one for ours.
                self._loop.call_soon_threadsafe(callback, context=self._context.copy())
        except RuntimeError:  # closed loop, trio.RunFinishedError
            return False
        return True

    def spawn(self, call: Callable[[], Awaitable[T]], *, name: str) -> OwnedTask[T]:
        """Start `call` as an owned task with a copy of the caller's context. This loop only."""
        task: OwnedTask[T] = OwnedTask(self, name)
        task._start(call)
        return task

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Home) and self._loop is other._loop and self._token is other._token

    def __hash__(self) -> int:
        return hash((id(self._loop), id(self._token)))


class Latch:
    """An event that is set once and may be awaited from any event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._waiters: list[tuple[Home, anyio.Event]] = []

    def is_set(self) -> bool:
        """Whether `set` has been called."""
        return self._is_set

    def set(self) -> None:
        """Release every waiter. Any thread; the second time does nothing."""
        with self._lock:
            self._is_set = True
            waiters, self._waiters = self._waiters, []
        for home, event in waiters:
            if home.is_current():
                event.set()
            else:
                home.call_soon(event.set)

    async def wait(self) -> None:
        """Return once the latch is set."""
        waiter = (Home.current(), anyio.Event())
        with self._lock:
            if self._is_set:
                return
            self._waiters.append(waiter)
        try:
            await waiter[1].wait()
        finally:
            with self._lock, suppress(ValueError):
                self._waiters.remove(waiter)


class OwnedTask(Generic[T]):
    """A task that the fence started. Its outcome is kept; waiting for it never raises it."""

    def __init__(self, home: Home, name: str) -> None:
        self.home = home
        self.name = name
        self.cancel_called = False
        """Whether we asked it to stop; a request, not a fact."""
        self.error: BaseException | None = None
        self.cancelled = False
        """Whether it ended by cancellation."""
        self._value: T | None = None
        self._latch = Latch()
        self._callbacks: list[Callable[[], None]] = []
        self._cancel: Callable[[], object] | None = None

    @property
    def done(self) -> bool:
        """Whether the task has ended."""
        return self._latch.is_set()

    def cancel(self) -> None:
        """Ask the task to stop. Its home loop only.

        On asyncio this is `Task.cancel()`, which also reaches into an anyio shield; a task that
        swallows it goes on.
        """
        self.cancel_called = True
        if self._cancel is not None and not self.done:
            self._cancel()

    async def wait(self) -> None:
        """Return once the task has ended. Cancelling the waiter leaves the task alone."""
        await self._latch.wait()

    def result(self) -> T:
        """Return what the task returned, or raise what it raised; only after it is done."""
        assert self.done
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the home loop when the task has ended, at once if it has already."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    def _start(self, call: Callable[[], Awaitable[T]]) -> None:
        context = contextvars.copy_context()
        if self.home._loop is not None:
            # An eager task factory runs the first step in here: the handle may come too late.
            task = self.home._loop.create_task(
                self._run_asyncio(call), name=self.name, context=context
            )
            task.add_done_callback(self._observe)
            self._cancel = task.cancel
        else:
            import trio

            scope = trio.CancelScope()
            self._cancel = scope.cancel
            trio.lowlevel.spawn_system_task(
                self._run_trio, call, scope, name=self.name, context=context
            )

    async def _run_asyncio(self, call: Callable[[], Awaitable[T]]) -> None:
        if self.cancel_called:
            self._finish(None, asyncio.CancelledError(), cancelled=True)
            return
        try:
            value = await call()
        except asyncio.CancelledError as error:
            self._finish(None, error, cancelled=True)
        except GeneratorExit:
            # Thrown away with its closed loop: not an end that anybody could rely on.
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            self._finish(None, error)
            raise
        except BaseException as error:  # noqa: BLE001 - kept as the outcome
            self._finish(None, error)
        else:
            self._finish(value, None)

    async def _run_trio(self, call: Callable[[], Awaitable[T]], scope: trio.CancelScope) -> None:
        import trio

        # A system task must not raise: trio would take the whole run down. Cancelled from outside
        # of our scope means that the run is over, and has to go on up.
        value: T | None = None
        failure: BaseException | None = None
        try:
            with scope:
                value = await call()
        except trio.Cancelled as error:
            self._finish(None, error, cancelled=True)
            raise
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - kept as the outcome
            failure = error
        if scope.cancelled_caught:
            self._finish(None, _ended_by_cancel(self.name), cancelled=True)
        else:
            self._finish(value, failure)

    def _observe(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self.done:
            # Cancelled before its first step: the body never ran.
            self._finish(None, error or asyncio.CancelledError(), cancelled=task.cancelled())

    def _finish(
        self, value: T | None, error: BaseException | None, *, cancelled: bool = False
    ) -> None:
        self._value = value
        self.error = error
        self.cancelled = cancelled
        self._latch.set()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("a callback of the owned task %r failed", self.name)


def is_cancellation(error: BaseException) -> bool:
    """Whether an exception caught on the current event loop is its cancellation."""
    return isinstance(error, anyio.get_cancelled_exc_class())


class _EndedByCancel(Exception):
    """Stands for trio.Cancelled, which cannot be raised again outside of its scope."""


def _ended_by_cancel(name: str) -> Exception:
    return _EndedByCancel(f"{name} was cancelled")


def _in_trio() -> bool:
    trio: Any = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


def _nothing() -> None:
    return None
