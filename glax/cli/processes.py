"""Join the processes of one run."""

import os

import jax

# The number of processes, by what starts them: JAX's own variable, srun, Open MPI. A batch job has SLURM_NTASKS, too, but its
# script is one process.
COUNTS = ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def start_processes():
    """Join the other processes of the run, if environment variables say that there are several.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say so. `jax.distributed.initialize` finds the steps of Slurm,
    Open MPI and the hosts of a TPU slice by itself. Raises ValueError if a variable holds no number.
    """
    if jax.distributed.is_initialized():
        return
    address, count, number = (
        os.environ.get(f"JAX_{x}") for x in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    )
    if address and count and number:
        for name, value in (("JAX_NUM_PROCESSES", count), ("JAX_PROCESS_ID", number)):
            if not (value.isascii() and value.isdecimal()):
                raise ValueError(f"{name} must be a number, got {value!r}: set it to the same meaning on every host")
        jax.distributed.initialize(address, int(count), int(number))
        return
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if address or len(hosts) > 1 or any(os.environ.get(name, "1") not in ("", "1") for name in COUNTS):
        jax.distributed.initialize()
