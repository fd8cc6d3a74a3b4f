"""Isolation: where environments live while they are played, and what they may take there.

The settings, and which hosts they mean. What a host is belongs to `_hosts`; each kind has a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from art_gym.errors import UsageError
from art_gym.rollout._hosts import HostFactory, InlineHost, LocalHosts, Make, ThreadHost

IsolationName: TypeAlias = Literal["auto", "loop", "thread", "process", "ray"]
StartMethod: TypeAlias = Literal["forkserver", "spawn"]

_LEAST_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Each environment in a process of its own, on this machine.

    An environment that is stuck past its time is killed with everything it started, one that crashes fails its episode only, and the next
    episode gets a new process. Linux only.

    Attributes:
        memory: Bytes that an environment may take beyond what its process takes when it starts: private memory that it may write to, of which
            an allocation that goes beyond raises MemoryError, and resident memory of the process and all those it started together, which are
            killed beyond it. Each thread's stack (8 MiB) counts. None for no limit.
        cpu_seconds: Processor time that an environment may take in one episode; its process is killed beyond it. The time of processes that it
            started doesn't count. None for no limit.
        start_method: "forkserver" imports the environment's modules once and forks a process for each environment, within milliseconds;
            "spawn" starts each from nothing, which takes as long as the imports and suits modules that can't bear a fork (threads, connections
            or a GPU from import on).

    Raises:
        UsageError: A value can't be right.
    """

    memory: int | None = None
    cpu_seconds: float | None = None
    start_method: StartMethod = "forkserver"

    def __post_init__(self) -> None:
        _check_memory("Processes", self.memory)
        _check_amount("Processes.cpu_seconds", self.cpu_seconds, optional=True)
        if self.start_method not in get_args(StartMethod):
            raise UsageError(f"Processes.start_method must be one of {', '.join(get_args(StartMethod))}, not {self.start_method!r:.100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """Each environment in an actor of a Ray cluster.

    As with `Processes`, a stuck environment is killed, and one that crashes fails its episode only. Needs the extra `ray`.

    Attributes:
        num_cpus: What Ray reserves of a node's processors for each environment. With none free, an episode waits for its place, and that
            counts as time of the episode.
        memory: Bytes that Ray reserves of a node's memory for each environment, and that the environment may take beyond what its actor takes
            when it starts: an allocation that goes beyond raises MemoryError. None for no limit.
        address: The cluster, as for `ray.init`: "host:port", "auto" (the one that runs on this machine) or "local" (a new one on this machine,
            which ends with the rollout). None for the one that `RAY_ADDRESS` names or that runs on this machine, or else a new local one.
            Where Ray is initialised already, that is used and left as it is.
        runtime_env: What the actors need of files and packages, as for `ray.remote`.

    Raises:
        UsageError: A value can't be right.
    """

    num_cpus: float = 0.1
    memory: int | None = None
    address: str | None = None
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_amount("Ray.num_cpus", self.num_cpus)
        _check_memory("Ray", self.memory)
        if self.address is not None and not isinstance(self.address, str):
            raise UsageError(f"Ray.address must be text, such as 'auto' or '10.0.0.1:6379', not {self.address!r:.100}")
        if self.runtime_env is not None and not isinstance(self.runtime_env, Mapping):
            raise UsageError(f"Ray.runtime_env must be a mapping, such as {{'pip': [\"…\"]}}, not {self.runtime_env!r:.100}")


Isolation: TypeAlias = IsolationName | Processes | Ray


def check_isolation(isolation: Any) -> None:
    """See that the isolation is one.

    Raises:
        UsageError: It isn't.
    """
    if isinstance(isolation, type) and issubclass(isolation, Processes | Ray):
        raise UsageError(f"isolation must be an instance, not the class {isolation.__name__}: write {isolation.__name__}()")
    if isolation not in get_args(IsolationName) and not isinstance(isolation, Processes | Ray):
        raise UsageError(f"isolation must be one of {', '.join(get_args(IsolationName))}, or Processes(…) or Ray(…), not {isolation!r:.100}")


def host_factory(isolation: Isolation, make: Make) -> HostFactory:
    """Return what makes the hosts that the isolation asks for.

    For "auto" these are threads, which any environment can live in; whoever has seen an instant one asks again, for "loop".

    Args:
        isolation: A name, or the settings behind it.
        make: Makes an environment, where the host lives. For processes and actors it must pickle (cloudpickle: closures and lambdas do), with
            all that it refers to; `Making` does.

    Raises:
        UsageError: There is no such isolation, or `make` can't be sent to another process.
        MissingExtra: Ray isn't installed.
    """
    check_isolation(isolation)
    match isolation:
        case "loop":
            return LocalHosts(InlineHost, make)
        case "auto" | "thread":
            return LocalHosts(ThreadHost, make)
        case "process":
            return host_factory(Processes(), make)
        case "ray":
            return host_factory(Ray(), make)
        case Processes():
            from art_gym.rollout._process_host import ProcessHosts

            return ProcessHosts(isolation, make)
        case Ray():
            from art_gym.rollout._ray_host import RayHosts

            return RayHosts(isolation, make)


def _check_memory(owner: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < _LEAST_MEMORY):
        raise UsageError(f"{owner}.memory is a number of bytes of at least {_LEAST_MEMORY} (1 MiB), such as 512 << 20, not {value!r:.100}")


def _check_amount(what: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise UsageError(f"{what} must be a number of more than 0, not {value!r:.100}")
