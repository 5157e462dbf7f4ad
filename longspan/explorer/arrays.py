"""Arrays of a document: base64 of the smallest integers that hold them, each array once."""

import base64
from typing import Any

import numpy as np

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
        """
        kind, content = _packed(np.asarray(array))
        key = (kind, array.shape, content)
        if key not in self._known:
            self._known[key] = len(self.entries)
            text = base64.b64encode(content).decode()
            self.entries.append(dict(type=kind, shape=list(array.shape), data=text))
        return self._known[key]


def _packed(array: np.ndarray) -> tuple[str, bytes]:
    if array.dtype == bool:
        return "bits", np.packbits(array.reshape(-1), bitorder="little").tobytes()
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    kind, dtype = next(pair for pair in TYPES if np.iinfo(pair[1]).min <= low and high <= np.iinfo(pair[1]).max)
    return kind, np.ascontiguousarray(array.reshape(-1), np.dtype(dtype).newbyteorder("<")).tobytes()
