"""Many environments in a few worker processes, as one object that can't leak a process.

Workers are spawned, never forked: a forked copy of JAX hangs. A worker ends when its pipe closes,
so that it also goes when this process is killed; its JVM ends with it.
"""

import collections
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from mdlm_jax.envs.base import EnvFailure, Start, Step, Task, TextEnv
from mdlm_jax.envs.registry import find

TIMEOUT_S = 120.0  # one request; a JVM start on a busy machine takes seconds


class Pool:
    """`size` independent episodes ("slots") of environment `name`, spread over `workers`.

    Any failure of a worker ends the whole pool and raises EnvFailure; a ValueError of an
    environment (an unknown game, say) reaches the caller as it is.
    """

    def __init__(self, name: str, size: int, workers: int, timeout_s: float = TIMEOUT_S):
        find(name)  # a wrong name is told here, not by a worker
        self.size = size
        self._name = name
        self._timeout_s = timeout_s
        self._workers = [_Worker(name, number) for number in range(max(1, min(workers, size)))]

    def reset(self, slots: Sequence[int], tasks: Sequence[Task]) -> list[Start]:
        """Starts tasks[i] in slots[i]; answers in the same order."""
        return self._all(_reset, slots, tasks)

    def step(self, slots: Sequence[int], actions: Sequence[str]) -> list[Step]:
        """Takes actions[i] in slots[i]; answers in the same order."""
        return self._all(_step, slots, actions)

    def map(self, play: Callable[[TextEnv, Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
        """Yields play(environment, job) per job, in order; `play` is a module-level function.

        Results never depend on the number of workers as long as `play` starts with a reset.
        """
        jobs = enumerate(jobs)
        waiting: dict[int, Any] = {}  # answers that came before their turn
        busy: dict[_Worker, int] = {}
        following = 0
        try:
            for worker in self._workers:
                self._give(worker, play, jobs, busy)
            while busy:
                for worker in self._ready(list(busy)):
                    waiting[busy.pop(worker)] = self._take(worker)[0]
                    self._give(worker, play, jobs, busy)
                while following in waiting:
                    yield waiting.pop(following)
                    following += 1
        finally:
            if busy:  # abandoned halfway: the answers on their way would be taken for others
                self.close()

    def close(self) -> None:
        """Ends every worker and JVM; may be called twice."""
        for worker in self._workers:
            worker.connection.close()  # a worker reads the end of its pipe and leaves
        for worker in self._workers:
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _all(self, function: Callable, slots: Sequence[int], arguments: Sequence[Any]) -> list[Any]:
        """Calls function(environment, argument) in every slot at once."""
        self._check(slots, arguments)
        calls: dict[_Worker, list[tuple]] = collections.defaultdict(list)
        for slot, argument in zip(slots, arguments, strict=True):
            calls[self._workers[slot % len(self._workers)]].append((slot, function, argument))
        for worker, batch in calls.items():
            self._ask(worker, batch)
        answers = {}
        for worker, batch in calls.items():
            self._ready([worker])
            answers |= zip([slot for slot, _, _ in batch], self._take(worker), strict=True)
        return [answers[slot] for slot in slots]

    def _check(self, slots: Sequence[int], arguments: Sequence[Any]) -> None:
        if not self._workers:
            raise EnvFailure(f"{self._name}: this pool is closed; make a new one")
        if len(slots) != len(arguments) or len(set(slots)) != len(slots):
            raise ValueError(f"slots {slots}: one per argument ({len(arguments)}), no doubles")
        if any(not 0 <= slot < self.size for slot in slots):
            raise ValueError(f"slots {slots}: each in [0, {self.size})")

    def _give(self, worker: "_Worker", play: Callable, jobs: Iterator, busy: dict) -> None:
        """Sends the next job, if one is left."""
        for number, job in jobs:
            self._ask(worker, [(0, play, job)])
            busy[worker] = number
            return

    def _ask(self, worker: "_Worker", batch: list[tuple]) -> None:
        worker.batch = batch
        try:
            worker.connection.send(batch)
        except OSError as error:
            self._fail(worker, f"is gone ({error})")

    def _ready(self, workers: list["_Worker"]) -> list["_Worker"]:
        """Waits for one of `workers` to answer; those that did."""
        ready = wait([worker.connection for worker in workers], self._timeout_s)
        if not ready:
            workers[0].process.kill()  # it would not notice that its pipe closed
            self._fail(workers[0], f"gave no answer for {self._timeout_s:g} s")
        return [worker for worker in workers if worker.connection in ready]

    def _take(self, worker: "_Worker") -> list[Any]:
        try:
            answers, error = worker.connection.recv()
        except (EOFError, OSError):
            self._fail(worker, "died")
        if isinstance(error, ValueError):
            self.close()
            raise error
        if error is not None:
            self._fail(worker, f"raised\n{error}", batch=worker.batch[len(answers) :])
        return answers

    def _fail(self, worker: "_Worker", what: str, batch: list[tuple] | None = None) -> None:
        slot, function, argument = (batch or worker.batch)[0]
        name = getattr(function, "func", function).__name__  # it may be a partial
        self.close()
        raise EnvFailure(
            f"{self._name}: worker {worker.number} (process {worker.process.pid}, "
            f"exit code {worker.process.exitcode}) {what}\n"
            f"It was at {name} of slot {slot}: {argument!r:.300}. "
            "All workers were stopped; run it again, with fewer workers if memory is short."
        )


def _reset(env: TextEnv, task: Task) -> Start:
    return env.reset(task)


def _step(env: TextEnv, action: str) -> Step:
    return env.step(action)


class _Worker:
    """One process and this side's end of its pipe."""

    def __init__(self, name: str, number: int):
        context = multiprocessing.get_context("spawn")
        self.number = number
        self.batch: list[tuple] = []  # what it was asked last
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()  # else its death would not close the pipe


def _serve(connection: Connection, name: str) -> None:
    """The worker's life: answers batches of calls until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's; it closes the pipe
    envs: dict[int, TextEnv] = {}
    try:
        while True:
            connection.send(_answer(envs, name, connection.recv()))
    except (EOFError, OSError):
        return
    finally:
        for env in envs.values():
            env.close()


def _answer(envs: dict[int, TextEnv], name: str, batch: list[tuple]) -> tuple[list[Any], Any]:
    """Results so far, and the ValueError or the report that ended them, or None."""
    answers = []
    try:
        for slot, function, argument in batch:
            if slot not in envs:
                envs[slot] = find(name)()
            answers.append(function(envs[slot], argument))
    except ValueError as error:
        return answers, error
    except EnvFailure as error:
        return answers, str(error)
    except Exception:  # noqa: BLE001  whatever it is, the parent must hear of it
        return answers, traceback.format_exc()
    return answers, None
