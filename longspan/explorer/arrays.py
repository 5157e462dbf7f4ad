"""Arrays of a document: base64 of the smallest integers that hold them, or runs of equal steps; each array once."""

import base64
import json
from typing import Any

import numpy as np

SHORTER = 4  # runs are tried for arrays with at least this many entries per run
TYPES = (("i8", np.int8), ("i16", np.int16), ("i32", np.int32))


class Arrays:
    """The arrays of a document. Equal arrays are stored once."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._known: dict[tuple[Any, ...], int] = {}

    def add(self, array: np.ndarray) -> int:
        """The index of an array of bools or int32.

        Example:
            >>> arrays = Arrays()
            >>> arrays.add(np.array([3, -1])), arrays.add(np.array([True, False, True])), arrays.add(np.array([3, -1]))
            (0, 1, 0)
            >>> arrays.entries
            [{'type': 'i8', 'shape': [2], 'data': 'A/8='}, {'type': 'bits', 'shape': [3], 'data': 'BQ=='}]
            >>> arrays.entries[arrays.add(np.arange(1000))].keys()
            dict_keys(['type', 'shape', 'steps', 'counts'])
        """
        array = np.ascontiguousarray(array)
        key = (array.dtype.kind, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = len(self.entries)
            self.entries.append(_entry(array))
        return self._known[key]


def _entry(array: np.ndarray) -> dict[str, Any]:
    """An array as runs of equal steps if these are shorter: ids of packed documents, positions, few flags."""
    plain = _plain(array)
    steps = np.diff(array.reshape(-1).astype(np.int64), prepend=0)
    starts = np.flatnonzero(np.diff(steps, prepend=~steps[:1]))
    if len(starts) * SHORTER > len(steps) or np.abs(steps).max(initial=0) > np.iinfo(np.int32).max:
        return plain
    counts = np.diff(starts, append=len(steps))
    runs = dict(type=plain["type"], shape=plain["shape"], steps=_plain(steps[starts]), counts=_plain(counts))
    if len(json.dumps(runs)) < len(plain["data"]):
        return runs
    return plain


def _plain(array: np.ndarray) -> dict[str, Any]:
    kind, content = _packed(array)
    return dict(type=kind, shape=list(array.shape), data=base64.b64encode(content).decode())


def _packed(array: np.ndarray) -> tuple[str, bytes]:
    if array.dtype == bool:
        return "bits", np.packbits(array.reshape(-1), bitorder="little").tobytes()
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    kind, dtype = next(pair for pair in TYPES if np.iinfo(pair[1]).min <= low and high <= np.iinfo(pair[1]).max)
    return kind, np.ascontiguousarray(array.reshape(-1), np.dtype(dtype).newbyteorder("<")).tobytes()
