"""Pictures of masks."""

import numpy as np

from longspan.masks import Mask


def draw(mask: Mask, q_len: int, kv_len: int, *, batch: int = 0, head: int = 0, most: int = 64) -> str:
    """A picture in characters: `#` = may attend, `.` = may not; by blocks (`+` = partly) if a side is over `most`."""
    for name, value, size in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= value < size and size > 1:
            raise IndexError(f"{name}={value} is out of range: the mask tells {size} apart.")
    cell = max(1, -(-q_len // most), -(-kv_len // most))
    rows = range(0, q_len, cell)
    some, every = cells(mask, q_len, kv_len, cell, batch=batch, head=head)
    picture = np.where(every, "#", np.where(some, "+", "."))
    return "\n".join("".join(picture[i]) for i, _ in enumerate(rows))


def cells(mask: Mask, q_len: int, kv_len: int, cell: int, *, batch: int = 0, head: int = 0):
    """(any, all) of the pairs in each cell of `cell` x `cell` slots, row by row so that T×S never exists."""
    q, kv = mask._sides(q_len, kv_len, None, None, np)
    batch, head = min(batch, q.batch.size - 1), min(head, q.head.size - 1)
    q, kv = (s.at(batch=q.batch[batch : batch + 1], head=q.head[:, head : head + 1]) for s in (q, kv))
    edges = np.arange(0, kv_len, cell)
    some, every = [], []
    for start in range(0, q_len, cell):
        size = min(cell, q_len - start)
        truth = np.broadcast_to(np.asarray(mask.allowed(q.slots(start, size), kv.slots())), (1, 1, size, kv_len))[0, 0]
        any_row, all_row = truth.any(0), truth.all(0)
        some.append(np.maximum.reduceat(any_row, edges) if kv_len else any_row)
        every.append(np.minimum.reduceat(all_row, edges) if kv_len else all_row)
    return np.array(some, bool), np.array(every, bool)
