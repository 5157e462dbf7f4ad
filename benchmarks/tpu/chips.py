"""Compiles programs for TPUs on a machine without one. This needs libtpu, whose compiler JAX loads; nothing runs."""

import functools

# To set before JAX starts. Several processes may load libtpu, and none asks a cloud host for its metadata.
ENVIRONMENT = dict(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
)  # fmt: skip
TOPOLOGIES = dict(v4="v4:2x2x1", v5e="v5e:2x2", v5p="v5p:2x2x1", v6e="v6e:2x2", tpu7x="tpu7x:2x2x1")


@functools.cache
def devices(topology: str) -> tuple:
    """The absent devices of a topology, such as v5e:4x4."""
    from jax.experimental import topologies

    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def mesh_of(topology: str, axis: str = "sp", count: int | None = None):
    """A mesh with one axis of all chips of a topology, or of the first `count`."""
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(devices(topology)[:count]), (axis,))


def compile_on(mesh, spec, function, *arguments):
    """The compiled program of a function whose arguments and results are all sharded by `spec`.

    Without the abstract mesh, kernels would ask the CPU for its kind of TPU.
    """
    import jax
    from jax.sharding import NamedSharding

    placed = NamedSharding(mesh, spec)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, _dtype(x), sharding=placed), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function, out_shardings=placed).lower(*shapes).compile()


def compile_for(chip: str, function, *arguments):
    """The compiled program of a function on one chip. Arrays are only asked for their shapes and dtypes."""
    from jax.sharding import PartitionSpec

    return compile_on(mesh_of(TOPOLOGIES[chip], count=1), PartitionSpec(), function, *arguments)


def temporary_bytes(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def _dtype(x):
    """The dtype that JAX gives a NumPy array: 32 bits for 64."""
    import jax

    return jax.dtypes.canonicalize_dtype(x.dtype)
