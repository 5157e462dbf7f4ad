"""BigBird and Longformer in NumPy float64, one query at a time, written from the specification alone."""

import numpy as np


def softmax_over(q, keys, values):
    """Attention of one query over a list of keys, each as often as it is listed."""
    if len(keys) == 0:
        return np.zeros_like(q)
    scores = np.array([q @ key for key in keys]) / np.sqrt(len(q))
    powers = np.exp(scores - scores.max())
    return (powers / powers.sum()) @ np.array(values)


def bigbird_blocks(i, nb, random):
    """The key blocks that query block i attends to, each as often as it counts."""
    if i in (0, nb - 1):
        return list(range(nb))
    if i == 1:
        return [0, 1, 2, nb - 1, *random[0]]
    if i == nb - 2:
        return [0, nb - 3, nb - 2, nb - 1, *random[nb - 3]]
    return [0, i - 1, i, i + 1, nb - 1, *random[i - 1]]


def bigbird(q, k, v, block_size, rand_attn, q_mask=None, kv_mask=None):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, _ = q.shape
    group, nb = N // k.shape[2], T // block_size
    real_q = np.ones((B, T), bool) if q_mask is None else np.broadcast_to(np.asarray(q_mask) != 0, (B, T))
    real_k = np.ones((B, T), bool) if kv_mask is None else np.broadcast_to(np.asarray(kv_mask) != 0, (B, T))
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(B, T, N):
        listed = bigbird_blocks(t // block_size, nb, np.asarray(rand_attn)[n % len(rand_attn)].tolist())
        slots = [s for j in listed for s in range(j * block_size, (j + 1) * block_size) if real_k[b, s]]
        if real_q[b, t]:
            out[b, t, n] = softmax_over(q[b, t, n], k[b, slots, n // group], v[b, slots, n // group])
    return out


def longformer(q, k, v, q_global, k_global, v_global, window, token_kinds=None, dilation=1, causal=False):
    q, k, v, q_global, k_global, v_global = (np.asarray(x, np.float64) for x in (q, k, v, q_global, k_global, v_global))
    B, T, N, _ = q.shape
    group = N // k.shape[2]
    kinds = np.zeros((B, T), int) if token_kinds is None else np.broadcast_to(np.asarray(token_kinds), (B, T))
    dilations = np.broadcast_to(np.asarray(dilation), (N,))
    windows = np.broadcast_to(np.asarray(window), (B,))
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(B, T, N):
        seen = [s for s in range(T) if kinds[b, s] >= 0 and (s <= t or not causal)]
        if kinds[b, t] < 0:
            continue
        if kinds[b, t] > 0:
            out[b, t, n] = softmax_over(q_global[b, t, n], k_global[b, seen, n // group], v_global[b, seen, n // group])
            continue
        near = {t + int(dilations[n]) * j for j in range(-windows[b], windows[b] + 1)}
        seen = [s for s in seen if kinds[b, s] > 0 or s in near]
        out[b, t, n] = softmax_over(q[b, t, n], k[b, seen, n // group], v[b, seen, n // group])
    return out
