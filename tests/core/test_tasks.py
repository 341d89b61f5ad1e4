"""Owned tasks: started anywhere, observed always, and never in the way of their loop."""

from __future__ import annotations

import asyncio
import contextvars

import anyio
import anyio.to_thread
import pytest

from fence.tasks import Home, Latch, OwnedTask


async def test_an_outcome_is_kept_and_never_raised_by_waiting() -> None:
    async def fail() -> None:
        raise OSError("kept")

    async def work() -> int:
        return 4

    home = Home.current()
    good, bad = home.spawn(work, name="good"), home.spawn(fail, name="bad")
    await good.wait()
    await bad.wait()
    assert good.result() == 4
    assert isinstance(bad.error, OSError)
    assert not bad.cancelled
    with pytest.raises(OSError, match="kept"):
        bad.result()


async def test_a_cancelled_task_says_so() -> None:
    home = Home.current()
    task = home.spawn(anyio.sleep_forever, name="forever")
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await task.wait()
    assert task.cancelled
    assert task.cancel_called


async def test_a_task_cancelled_before_its_first_step_is_done_all_the_same() -> None:
    ran = []

    async def work() -> None:
        ran.append(1)
        await anyio.sleep_forever()

    task = Home.current().spawn(work, name="early")
    task.cancel()
    await task.wait()
    assert task.cancelled
    task.cancel()  # a second time changes nothing


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancel_reaches_into_a_shield_on_asyncio() -> None:
    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep_forever()

    task = Home.current().spawn(shielded, name="shielded")
    await anyio.wait_all_tasks_blocked()
    task.cancel()
    await task.wait()
    assert task.cancelled


async def test_cancelling_the_waiter_leaves_the_task_alone() -> None:
    gate = anyio.Event()
    task = Home.current().spawn(gate.wait, name="gate")
    with anyio.move_on_after(0):
        await task.wait()
    assert not task.done
    gate.set()
    await task.wait()
    assert task.error is None


async def test_the_task_outlives_the_scope_that_started_it() -> None:
    gate, tasks = anyio.Event(), []

    async def starter() -> None:
        tasks.append(Home.current().spawn(gate.wait, name="gate"))

    async with anyio.create_task_group() as group:
        group.start_soon(starter)
    gate.set()
    await tasks[0].wait()
    assert not tasks[0].cancelled


async def test_a_task_takes_the_context_of_who_started_it() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")
    name.set("starter")

    async def work() -> str:
        return name.get()

    task = Home.current().spawn(work, name="context")
    name.set("later")
    await task.wait()
    assert task.result() == "starter"


async def test_callbacks_run_when_it_is_done_and_at_once_after() -> None:
    seen = []
    task = Home.current().spawn(anyio.wait_all_tasks_blocked, name="x")
    task.on_done(lambda: seen.append("done"))
    assert seen == []
    await task.wait()
    assert seen == ["done"]
    task.on_done(lambda: seen.append("late"))
    assert seen == ["done", "late"]


async def test_a_loop_can_be_called_from_another_thread() -> None:
    home, latch, where = Home.current(), Latch(), []

    def callback() -> None:
        where.append(Home.current() == home)
        latch.set()

    assert await anyio.to_thread.run_sync(lambda: home.call_soon(callback))
    await latch.wait()
    assert where == [True]
    assert home.is_current()
    assert not await anyio.to_thread.run_sync(home.is_current)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_loop_that_is_over_says_so(backend: str) -> None:
    homes = []

    async def main() -> None:
        homes.append(Home.current())
        assert homes[0].is_alive()
        assert homes[0].now() <= anyio.current_time() <= homes[0].now()

    anyio.run(main, backend=backend)
    home = homes[0]
    assert not home.is_alive()
    assert not home.is_current()
    assert home.call_soon(lambda: None) is False


def test_outside_of_a_loop_there_is_no_home() -> None:
    with pytest.raises(RuntimeError):
        Home.current()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_end_of_the_loop_ends_its_tasks(backend: str) -> None:
    tasks: list[OwnedTask[None]] = []

    async def main() -> None:
        tasks.append(Home.current().spawn(anyio.sleep_forever, name="forever"))
        await anyio.wait_all_tasks_blocked()

    anyio.run(main, backend=backend)
    assert tasks[0].done
    assert tasks[0].cancelled
    assert not tasks[0].cancel_called


def test_an_exit_in_an_owned_task_ends_the_program() -> None:
    """asyncio hands SystemExit to whoever runs the loop; the outcome is kept besides."""
    tasks: list[OwnedTask[None]] = []

    async def leave() -> None:
        raise SystemExit(3)

    async def main() -> None:
        tasks.append(Home.current().spawn(leave, name="leave"))
        await asyncio.sleep(3600)

    with pytest.raises(SystemExit):
        asyncio.run(main())
    assert isinstance(tasks[0].error, SystemExit)


async def test_a_latch_is_set_once_and_forgets_who_left() -> None:
    latch = Latch()
    with anyio.move_on_after(0):
        await latch.wait()
    assert latch._waiters == []
    latch.set()
    latch.set()
    await latch.wait()
    assert latch.is_set()


def test_an_eager_task_factory_is_fine() -> None:
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None:
        pytest.skip("Python 3.11 has no eager tasks")

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)

        async def quick() -> int:
            return 1

        task = Home.current().spawn(quick, name="quick")
        await task.wait()
        assert task.result() == 1
        task = Home.current().spawn(asyncio.Event().wait, name="stuck")
        task.cancel()
        await task.wait()
        assert task.cancelled

    asyncio.run(main())
