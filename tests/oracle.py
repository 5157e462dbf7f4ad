"""All masks in plain Python, one pair at a time. `dense` and the engines are compared with them."""

import inspect

import numpy as np

from longspan import masks as m


def dense(mask, q_len, kv_len, q_positions=None, kv_positions=None, batch=1, heads=1):
    """bool [batch, heads, q_len, kv_len] by a double loop."""
    q_pos = _rows(q_positions, q_len, batch)
    kv_pos = _rows(kv_positions, kv_len, batch)
    truth = np.zeros((batch, heads, q_len, kv_len), bool)
    for b, n, i, j in np.ndindex(*truth.shape):
        truth[b, n, i, j] = allowed(mask, b, n, i, j, int(q_pos[b, i]), int(kv_pos[b, j]))
    return truth


def allowed(mask, b, n, i, j, q, k):
    """Whether slot i at position q may attend to slot j at position k."""
    match mask:
        case m.And():
            return all(allowed(part, b, n, i, j, q, k) for part in mask.masks)
        case m.Or():
            return any(allowed(part, b, n, i, j, q, k) for part in mask.masks)
        case m.Not():
            return not allowed(mask.mask, b, n, i, j, q, k)
        case m.PerHead():
            return allowed(mask.masks[n if len(mask.masks) > 1 else 0], b, n, i, j, q, k)
        case m.Full() | m.Empty():
            return isinstance(mask, m.Full)
        case m.Causal():
            return k <= q + number(mask.offset, b)
        case m.Band():
            low = mask.low is None or number(mask.low, b) <= k - q
            return low and (mask.high is None or k - q <= number(mask.high, b))
        case m.Window():
            d = number(mask.dilation, b)
            return (k - q) % d == 0 and -number(mask.left, b) * d <= k - q <= number(mask.right, b) * d
        case m.Chunk():
            return q // number(mask.size, b) == k // number(mask.size, b)
        case m.BlockCausal():
            return k // number(mask.size, b) <= q // number(mask.size, b)
        case m.Prefix():
            return k < number(mask.length, b)
        case m.KvLengths():
            return j < number(mask.lengths, b)
        case m.QLengths():
            return i < number(mask.lengths, b)
        case m.Between():
            return row(row(mask.starts, b), n)[i] <= j < row(row(mask.stops, b), n)[i]
        case m.Segments():
            mine, theirs = row(mask.q_ids, b)[i], row(mask.q_ids if mask.kv_ids is None else mask.kv_ids, b)[j]
            return mine == theirs and mine >= 0
        case m.FirstOfSegment():
            return bool(row(mask.q_ids, b)[i] == row(mask.first_ids, b)[j] >= 0)
        case m.TokenTypes():
            mine, theirs = row(mask.q_types, b)[i], row(mask.q_types if mask.kv_types is None else mask.kv_types, b)[j]
            return mine == theirs and (mine != 0 or mask.zero == "none")
        case m.Global():
            q_global = q in mask.indices or (mask.q_flags is not None and bool(row(mask.q_flags, b)[i]))
            k_global = k in mask.indices or (mask.kv_flags is not None and bool(row(mask.kv_flags, b)[j]))
            return (mask.rows and q_global) or (mask.columns and k_global)
        case m.Compare():
            (mine, mine_counts), (theirs, theirs_count) = term(mask.q, b, n, i, q), term(mask.kv, b, n, j, k)
            relations = {"<=": mine <= theirs, ">=": mine >= theirs, "<": mine < theirs, ">": mine > theirs}
            return relations.get(mask.relation, mine == theirs) and mine_counts and theirs_count
        case m.Blocks():
            table = np.asarray(mask.table)
            table = row(table, b) if table.ndim == 4 else table
            return j // mask.block_size in row(table, n)[i // mask.block_size].tolist()
        case m.Dense():
            array = np.asarray(mask.array)
            array = array.reshape((1,) * (4 - array.ndim) + array.shape)
            place = [min(b, array.shape[0] - 1), min(n, array.shape[1] - 1)]
            for slot, offset, size in ((i, mask.q_offset, array.shape[2]), (j, mask.kv_offset, array.shape[3])):
                place.append(min(slot, size - 1) if offset is None else slot - number(offset, b))
                if not 0 <= place[-1] < size:
                    return False
            return bool(array[tuple(place)])
        case m.Custom():
            row_and_head = (b if mask.batch > 1 else 0, n if mask.heads > 1 else 0)
            four = len(inspect.signature(mask.fn).parameters) == 4 + len(mask.arrays)
            return bool(mask.fn(*row_and_head[: 2 * four], np.array(q), np.array(k), *mask.arrays))
    raise TypeError(type(mask))


def term(of, b, n, slot, position):
    """A term's value for one token, and whether it is defined there."""
    match of.of:
        case "array":
            entries = row(of.data, b)
            source = int((entries if entries.ndim == 1 else row(entries, n))[slot])
        case "number":
            source = number(of.data, b)
        case "member":
            source = int(position in of.data)
        case _:
            source = position if of.of == "position" else slot
    value = source // number(of.divide, b)
    value = value if of.modulo is None else value % number(of.modulo, b)
    return value + number(of.plus, b), {"all": True, ">=0": source >= 0, "!=0": source != 0}[of.valid]


def number(value, b):
    flat = np.atleast_1d(np.asarray(value))
    return int(flat[b if len(flat) > 1 else 0])


def row(array, b):
    array = np.asarray(array)
    return array[b if len(array) > 1 else 0]


def _rows(positions, length, batch):
    positions = np.arange(length) if positions is None else np.asarray(positions)
    return np.broadcast_to(positions, (batch, length))
