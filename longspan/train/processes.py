"""`join`: connects this process with the other processes of a run."""

import os
import threading
from typing import Any, NamedTuple

import jax

from longspan.checks import check_static_size

# Variables of JAX's own environment, each with the number of processes if it tells it.
CLUSTERS = {
    "JAX_COORDINATOR_ADDRESS": None,
    "SLURM_PROCID": "SLURM_NTASKS",
    "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
}
PREFIX = "LONGSPAN_WORKER_"
STDIN = 0


class WorkerSettings(NamedTuple):
    """What the supervisor tells each of its processes through the environment."""

    coordinator: str  # address:port of the process with rank 0
    bind: str  # the address:port at which that process listens
    processes: int
    rank: int
    heartbeat_seconds: int

    def environment(self) -> dict[str, str]:
        """As variables."""
        return {PREFIX + name.upper(): str(value) for name, value in self._asdict().items()}

    @classmethod
    def of_environment(cls) -> "WorkerSettings | None":
        """The inverse; None without a supervisor."""
        if PREFIX + "RANK" not in os.environ:
            return None
        given: dict[str, Any] = {name: os.environ[PREFIX + name.upper()] for name in cls._fields}
        for name in ("processes", "rank", "heartbeat_seconds"):
            given[name] = int(given[name])
        return cls(**given)


def join() -> bool:
    """Connects this process with the others of its run, before JAX is used, and returns whether there are others.

    Under `ls.train.supervise`, the supervisor's settings are used, and the process ends as soon as the supervisor does.
    On a cluster, `jax.distributed.initialize()` reads JAX's own environment (`JAX_COORDINATOR_ADDRESS`, Slurm, Open
    MPI). Anywhere else nothing happens.

    Example:
        >>> from longspan import train
        >>> train.join()
        False
    """
    settings = WorkerSettings.of_environment()
    if settings is None and not _on_cluster():
        return False
    # On CPUs only gloo sends between processes.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # `fit` saves on SIGTERM; JAX's own service would take the signal.
    jax.config.update("jax_enable_preemption_service", False)
    if settings is None:
        jax.distributed.initialize()
        return jax.process_count() > 1
    check_static_size("processes", settings.processes, 1)
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    jax.distributed.initialize(
        settings.coordinator,
        num_processes=settings.processes,
        process_id=settings.rank,
        coordinator_bind_address=settings.bind,
        heartbeat_timeout_seconds=settings.heartbeat_seconds,
    )
    return settings.processes > 1


def _on_cluster() -> bool:
    return any(name in os.environ and os.environ.get(count or "", "2") != "1" for name, count in CLUSTERS.items())


def _end_with_supervisor() -> None:
    """Ends the process when its standard input closes: then the supervisor is gone."""
    # Not `sys.stdin`, whose lock Python needs when it shuts down.
    while os.read(STDIN, 1):
        pass
    os._exit(1)
