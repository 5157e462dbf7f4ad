"""The implementations of attention that `bench` times: Longspan's engines, `jax.nn` and PyTorch's."""

import functools
import importlib
import operator
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from longspan.cli.library import library
from longspan.optional import is_installed

PAUSE = 0.05  # seconds between two implementations: thread pools spin for a while after their work is done
MAX_DENSE_BYTES = 1 << 30  # dense implementations are skipped if their scores take more
TOO_LARGE = "its array of attention scores would need more than 1 GiB"
NOT_INSTALLED = "not installed"


class Problem(NamedTuple):
    """One attention that all implementations compute."""

    mask: Any
    length: int
    heads: int
    head_dim: int
    backward: bool

    @property
    def dense_bytes(self) -> int:
        return 4 * self.heads * self.length**2


class Implementation(NamedTuple):
    """A compiled implementation, and the bytes of its temporary memory, if known."""

    run: Callable[[], Any]
    temporary_bytes: int | None


def machine() -> dict[str, Any]:
    """The processor, the device and the versions."""
    import jax

    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model)
    return dict(
        cpu=model,
        cores=os.cpu_count() or 1,
        device=jax.devices()[0].device_kind,
        python=platform.python_version(),
        longspan=library().__version__,
        jax=jax.__version__,
    )


def implementations_of(problem: Problem, engines: list[str], *, peers: bool) -> dict[str, Implementation | str]:
    """The implementations by name; a string if one cannot compute the problem, with the reason."""
    import jax.numpy as jnp

    from longspan.testing import Shape, make_qkv

    sizes = Shape(1, problem.length, problem.length, problem.heads, problem.heads, problem.head_dim)
    qkv = make_qkv(sizes, jnp.float32)
    found: dict[str, Implementation | str] = {name: _engine(problem, name, qkv) for name in engines}
    if peers:
        found |= {"jax.nn": _jax_nn(problem, qkv), "torch sdpa": _torch_sdpa(problem, qkv)}
        found |= {"FlexAttention": _flex_attention(problem, qkv)}
    return found


def _engine(problem: Problem, name: str, qkv: Any) -> Implementation | str:
    ls = library()
    from longspan.engines import ENGINES, Request

    q, k, v = qkv
    reason = ENGINES[name].unsupported(Request.of(q=q, k=k, v=v, mask=problem.mask))
    if reason is not None:
        return reason
    if name == "reference" and problem.dense_bytes > MAX_DENSE_BYTES:
        return TOO_LARGE
    return _compiled(problem, qkv, lambda q, k, v, mask: ls.attention(q, k, v, mask=mask, engine=name), problem.mask)


def _jax_nn(problem: Problem, qkv: Any) -> Implementation | str:
    """`jax.nn.dot_product_attention` under the dense mask."""
    import jax

    if problem.dense_bytes > MAX_DENSE_BYTES:
        return TOO_LARGE
    mask = problem.mask.dense(problem.length, problem.length)
    return _compiled(problem, qkv, lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask), mask)


def _compiled(problem: Problem, qkv: Any, attend: Callable[..., Any], mask: Any) -> Implementation:
    import jax

    def gradients(q, k, v, mask):
        return jax.grad(lambda *x: attend(*x, mask).sum(), argnums=(0, 1, 2))(q, k, v)

    program = jax.jit(gradients if problem.backward else attend).lower(*qkv, mask).compile()
    analysis = program.memory_analysis()
    temporary = getattr(analysis, "temp_size_in_bytes", None)
    return Implementation(lambda: jax.block_until_ready(program(*qkv, mask)), temporary)


def _torch_sdpa(problem: Problem, qkv: Any) -> Implementation | str:
    """PyTorch's `scaled_dot_product_attention` under the dense mask."""
    if not is_installed("torch"):
        return NOT_INSTALLED
    if problem.dense_bytes > MAX_DENSE_BYTES:
        return TOO_LARGE
    torch = importlib.import_module("torch")
    q, k, v = _tensors(torch, qkv)
    for x in (q, k, v):
        x.requires_grad_(problem.backward)
    mask = torch.from_numpy(np.array(problem.mask.dense(problem.length, problem.length)))

    def run() -> Any:
        with torch.set_grad_enabled(problem.backward):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()
            if problem.backward:
                return torch.autograd.grad(out, (q, k, v))
            return out.item()

    return Implementation(run, None)


def _tensors(torch: Any, qkv: Any) -> list[Any]:
    return [torch.from_numpy(np.asarray(x).swapaxes(1, 2).copy()) for x in qkv]


def _flex_attention(problem: Problem, qkv: Any) -> Implementation | str:
    """PyTorch's FlexAttention, compiled, with the block mask that it derives from the mask's function."""
    if not is_installed("torch"):
        return NOT_INSTALLED
    if problem.backward:
        return "it has no backward pass on CPUs"
    torch, flex = importlib.import_module("torch"), importlib.import_module("torch.nn.attention.flex_attention")
    function, heads, length = _mask_function(torch, problem), problem.mask.heads, problem.length
    if function is None:
        return "the dense mask that its mask function reads would need more than 1 GiB"
    q, k, v = _tensors(torch, qkv)
    block_heads = heads if heads > 1 else None  # None: one mask for all heads
    blocks = flex.create_block_mask(function, None, block_heads, length, length, device="cpu")
    compiled = torch.compile(flex.flex_attention)

    def run() -> Any:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=blocks)

    try:
        run()
    except Exception as error:  # a compiler may raise any error; the table shows it
        return f"torch.compile: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return Implementation(run, None)


class _TorchSlots(NamedTuple):
    """The slots of one side as PyTorch tensors, with which `Mask.allowed` computes its rule inside FlexAttention."""

    index: Any

    @property
    def position(self) -> Any:
        return self.index

    def number(self, value: int) -> int:
        return value

    def is_one_of(self, positions: tuple[int, ...]) -> Any:
        return functools.reduce(operator.or_, (self.index == position for position in positions)) * 1


def _mask_function(torch: Any, problem: Problem) -> Callable[..., Any] | None:
    """The mask as FlexAttention's `mask_mod`: its rule, or a table lookup if it holds arrays or differs by head.

    None if the table would be too large.
    """
    import jax

    from longspan.masks import Empty, Full

    mask = problem.mask
    if isinstance(mask, Full):
        return lambda b, h, q, kv: q == q
    constant = any(isinstance(part, Full | Empty) for part in mask.atoms().walk())
    if not jax.tree.leaves(mask) and not constant and mask.heads == 1 and mask.reads <= {"position"}:
        return lambda b, h, q, kv: mask.allowed(_TorchSlots(q), _TorchSlots(kv))
    if mask.heads * problem.length**2 > MAX_DENSE_BYTES:
        return None
    table = torch.from_numpy(np.array(mask.dense(problem.length, problem.length))[0])
    if mask.heads == 1:
        return lambda b, h, q, kv: table[0, q, kv]
    return lambda b, h, q, kv: table[h, q, kv]


def median_seconds(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of each implementation. Every round runs all of them, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in times.items()}
