"""The masks of attention-gym, each as one expression of the algebra and as a Python function of one pair.

`build(**sizes)` of an exhibit returns the mask, the function of Python ints (head, q, k), and both lengths. `small`
sizes are odd, for dense masks; `large` sizes are for counting tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import longspan as ls
from longspan.masks.sides import Tiles


class Made(NamedTuple):
    """A mask for given sizes, and whether one pair is allowed as a Python function."""

    mask: ls.Mask
    truth: Callable[[int, int, int], bool]  # of head, query and key
    q_len: int
    kv_len: int


class Exhibit(NamedTuple):
    """One mask of the gallery."""

    sentence: str
    build: Callable[..., Made]
    small: dict
    large: dict
    tile: int = 32  # along both sides, for counting at the large sizes
    slack: float = 1.0  # upper bound on visited tiles per tile that holds an allowed pair


def causal(length):
    return Made(ls.Causal(), lambda h, q, k: k <= q, length, length)


def sliding_window(length, window):
    return Made(ls.Window(window, 0), lambda h, q, k: 0 <= q - k <= window, length, length)


def dilated_sliding_window(length, keys, dilation):
    def truth(h, q, k):
        return 0 <= q - k <= keys * dilation and (q - k) % dilation == 0

    return Made(ls.Window(keys, 0, dilation), truth, length, length)


def global_sliding_window(length, window, tokens):
    mask = ls.Window(window, window) | ls.Global(tokens)
    return Made(mask, lambda h, q, k: abs(q - k) <= window or q in tokens or k in tokens, length, length)


def attention_sinks(length, window, sinks):
    mask = ls.Causal() & (ls.Window(window, 0) | ls.Prefix(sinks))
    return Made(mask, lambda h, q, k: k <= q and (q - k <= window or k < sinks), length, length)


def prefix_lm(length, prefix):
    return Made(ls.Causal() | ls.Prefix(prefix), lambda h, q, k: k <= q or k < prefix, length, length)


def document(lengths):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return Made(ls.Segments(ids[None]), lambda h, q, k: bool(ids[q] == ids[k]), len(ids), len(ids))


def packed_documents(lengths, prefix):
    """Prefix LM within each document of a packed row."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    within = np.concatenate([np.arange(n) for n in lengths])
    mask = (ls.Causal() | ls.FirstOfSegment(ids[None], prefix)) & ls.Segments(ids[None])

    def truth(h, q, k):
        return bool(ids[q] == ids[k] and (within[k] <= within[q] or within[k] < prefix))

    return Made(mask, truth, len(ids), len(ids))


def shared_prefix(groups):
    """Each group is (tokens of the prompt, tokens of each answer)."""
    documents, prompts, group, number = [], [], [], 0
    for g, (prompt, *answers) in enumerate(groups):
        for place, length in enumerate((prompt, *answers)):
            documents += [number] * length
            prompts += [place == 0] * length
            group += [g] * length
            number += 1
    own, is_prompt, of = (np.array([x]) for x in (documents, prompts, group))
    to_prompt = ls.Segments(np.where(is_prompt, -1, of), np.where(is_prompt, of, -1))
    mask = ls.Causal() & (ls.Segments(own) | to_prompt)

    def truth(h, q, k):
        mine = documents[q] == documents[k] and k <= q
        return mine or (not prompts[q] and prompts[k] and group[q] == group[k])

    return Made(mask, truth, len(documents), len(documents))


def block_diffusion(length, size):
    """2 * length slots: noised tokens first, then clean tokens."""
    slot = np.arange(2 * length)
    clean, block = slot >= length, slot % length // size
    stops = np.minimum(length + (block + clean) * size, 2 * length)  # the clean blocks before a noised one, or up to it
    mask = ls.Segments(np.where(clean, -1, block)[None]) | ls.Between(np.full(2 * length, length), stops)

    def truth(h, q, k):
        mine, theirs = q % length // size, k % length // size
        if k < length:
            return q < length and mine == theirs
        return theirs < mine or (theirs == mine and q >= length)

    return Made(mask, truth, 2 * length, 2 * length)


def flamingo(text, image, intervals):
    """Text tokens attend to images: those in intervals[i] to image i. Starts and stops of intervals ascend."""
    starts, stops = np.array(intervals).T
    place = np.arange(text)
    first, last = np.searchsorted(stops, place, "right"), np.searchsorted(starts, place, "right")
    mask = ls.Between(first * image, np.maximum(first, last) * image)

    def truth(h, q, k):
        start, stop = intervals[k // image]
        return start <= q < stop

    return Made(mask, truth, text, image * len(intervals))


def natten(height, width, kernel):
    """Tokens are the pixels of an image, row by row. At the borders the kernel is shifted to stay inside the image."""

    def first(place, size):
        return (place - kernel // 2).clip(0, size - kernel)

    def seen(q, k):
        top, left = first(q // width, height), first(q % width, width)
        row, column = k // width, k % width
        return (top <= row) & (row < top + kernel) & (left <= column) & (column < left + kernel)

    def pairs(one, other):
        some = every = True
        for (q_low, q_high), (k_low, k_high), size in zip(one, other, (height, width), strict=True):
            some = some & (first(q_low, size) <= k_high) & (k_low < first(q_high, size) + kernel)
            every = every & (first(q_high, size) <= k_low) & (k_high < first(q_low, size) + kernel)
        return some, every

    def bounds(q, kv):
        return over_parts(rectangles(q, width), rectangles(kv, width), pairs)

    def truth(h, q, k):
        corner = [min(max(x - kernel // 2, 0), n - kernel) for x, n in ((q // width, height), (q % width, width))]
        return all(0 <= x - c < kernel for x, c in zip((k // width, k % width), corner, strict=True))

    return Made(ls.Custom(seen, bounds=bounds), truth, height * width, height * width)


def sliding_tiles(canvas, kernel, tile, text):
    """Tokens of an image or a video, tile by tile, then `text` tokens; sizes are in tokens along each axis."""
    counts, reach = (tuple(a // b for a, b in zip(of, tile, strict=True)) for of in (canvas, kernel))
    size, vision = int(np.prod(tile)), int(np.prod(canvas))
    tiles = -(-(vision + text) // size)
    table = np.full((1, tiles, int(np.prod(reach))), -1)
    corners = [
        [min(max(x - n // 2, 0), count - n) for x, n, count in zip(place, reach, counts, strict=True)]
        for place in np.ndindex(*counts)
    ]
    for number, corner in enumerate(corners):
        near = [np.add(corner, step) for step in np.ndindex(*reach)]
        table[0, number] = [np.ravel_multi_index(tuple(place), counts) for place in near]
    mask = ls.Blocks(table, size) | ls.Global(tuple(range(vision, vision + text)))

    def truth(h, q, k):
        if q >= vision or k >= vision:
            return True
        theirs, corner = np.unravel_index(k // size, counts), corners[q // size]
        return all(0 <= x - c < n for x, c, n in zip(theirs, corner, reach, strict=True))

    return Made(mask, truth, vision + text, vision + text)


def sparse_video_gen(prompt, frames, per_frame, width):
    """Head 0 attends to frames nearby, head 1 to the same place in all frames; prompt tokens are global."""
    length, near, apart = prompt + frames * per_frame, width * per_frame, width * per_frame // frames

    def seen(q, k):
        return abs((q - prompt) % per_frame - (k - prompt) % per_frame) < apart

    def pairs(one, other):
        (low, high), (k_low, k_high) = one, other
        some = (low - k_high < apart) & (k_low - high < apart)
        return some, (high - k_low < apart) & (k_high - low < apart)

    def bounds(q, kv):
        return over_parts(*(places(tiles, per_frame, prompt) for tiles in (q, kv)), pairs)

    everybody = ls.Global(tuple(range(prompt)))
    heads = (ls.Window(near - 1, near - 1) | everybody, ls.Custom(seen, bounds=bounds) | everybody)

    def truth(h, q, k):
        mine, theirs = (q - prompt) % per_frame, (k - prompt) % per_frame
        nearby = abs(q - k) < near if h == 0 else abs(mine - theirs) < apart
        return nearby or q < prompt or k < prompt

    return Made(ls.PerHead(heads), truth, length, length)


def chosen_blocks(blocks, size, chosen):
    """Blocks with the top-k random scores, as VSA, NSA and MoBA choose them by content."""
    scores = np.random.default_rng(0).random((1, 2, blocks, blocks))
    table = np.argsort(scores, axis=-1)[..., :chosen].astype(np.int32)

    def truth(h, q, k):
        return k // size in table[0, h, q // size]

    return Made(ls.Blocks(table, size), truth, blocks * size, blocks * size)


def tree(prefix, parents):
    """Drafted tokens attend to the prefix and to their ancestors. Parents come before their children."""
    nodes = len(parents)
    ancestors = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    mask = ls.Prefix(prefix) | ls.Dense(ancestors, kv_offset=prefix)

    def truth(h, q, k):
        node = q
        while node >= 0 and node != k - prefix:
            node = parents[node]
        return k < prefix or node >= 0

    return Made(mask, truth, nodes, prefix + nodes)


def draft_training(prefix, blocks, size):
    """Sampled blocks after a prefix: each token attends to the prefix and to its own block up to itself."""
    queries = blocks * size
    mine = np.arange(queries) // size
    theirs = np.concatenate([np.full(prefix, -1), mine])
    mask = ls.Prefix(prefix) | (ls.Segments(mine[None], theirs[None]) & ls.Causal(prefix))

    def truth(h, q, k):
        return k < prefix or (q // size == (k - prefix) // size and k - prefix <= q)

    return Made(mask, truth, queries, prefix + queries)


def over_parts(q_parts, kv_parts, pairs):
    """The bounds (some, every) of tiles that consist of a few simple parts; parts that are not real are ignored."""
    some, every = np.zeros((1, 1, 1, 1), bool), np.ones((1, 1, 1, 1), bool)
    for q_real, one in q_parts:
        for kv_real, other in kv_parts:
            real, (may_any, must_all) = q_real & kv_real, pairs(one, other)
            some, every = some | (real & may_any), every & (~real | must_all)
    return some, every


def rectangles(tiles: Tiles, width):
    """A run of pixels as rectangles: the end of one row, whole rows, the beginning of another row."""
    top, bottom, left, right = tiles.first // width, tiles.last // width, tiles.first % width, tiles.last % width
    one, zero = top == bottom, left * 0
    return (
        (top == top, ((top, top), (left, tiles.side.xp.where(one, right, width - 1)))),
        (bottom - top > 1, ((top + 1, bottom - 1), (zero, zero + width - 1))),
        (~one, ((bottom, bottom), (zero, right))),
    )


def places(tiles: Tiles, period, offset):
    """A run of tokens as places within a frame: one interval, or two if it passes the end of a frame."""
    first, last = (tiles.first - offset) % period, (tiles.last - offset) % period
    whole = tiles.last - tiles.first >= period - 1
    wraps = (first > last) & ~whole
    low, high = tiles.side.xp.where(whole, 0, first), tiles.side.xp.where(whole | wraps, period - 1, last)
    return (whole == whole, (low, high)), (wraps, (first * 0, last))


EVERY_FOURTH = tuple(max(0, i - 1 - i % 4) if i else -1 for i in range(19))

GALLERY = {
    "causal": Exhibit("Keys up to the query.", causal, dict(length=37), dict(length=512)),
    "sliding window": Exhibit(
        "Keys up to the query, within a window.",
        sliding_window, dict(length=37, window=5), dict(length=512, window=70),
    ),
    "dilated sliding window": Exhibit(
        "Every third key of a window.",
        dilated_sliding_window, dict(length=37, keys=4, dilation=3), dict(length=512, keys=30, dilation=3),
    ),
    "global sliding window": Exhibit(
        "Longformer: a window, and tokens that attend to all and are attended to by all.",
        global_sliding_window, dict(length=37, window=4, tokens=(0, 19)), dict(length=512, window=40, tokens=(0, 300)),
    ),
    "attention sinks": Exhibit(
        "StreamingLLM: a window and the first keys.",
        attention_sinks, dict(length=37, window=4, sinks=3), dict(length=512, window=40, sinks=4),
    ),
    "prefix LM": Exhibit(
        "All queries attend to a prefix; causal after it.",
        prefix_lm, dict(length=37, prefix=7), dict(length=512, prefix=100),
    ),
    "document": Exhibit(
        "Packed documents: queries attend only to their own.",
        document, dict(lengths=(7, 13, 1, 12)), dict(lengths=(100, 300, 80, 32)),
    ),
    "packed documents": Exhibit(
        "A prefix LM in every document of a packed row.",
        packed_documents, dict(lengths=(7, 13, 1, 12), prefix=3), dict(lengths=(100, 300, 80, 32), prefix=9),
    ),
    "shared prefix": Exhibit(
        "Several answers to one prompt, which is stored once.",
        shared_prefix, dict(groups=((5, 3, 4), (7, 2, 6, 1))), dict(groups=((96, 64, 64), (128, 32, 64, 64))),
    ),
    "block diffusion": Exhibit(
        "Noised blocks attend to themselves and to earlier clean blocks; clean blocks attend to clean blocks.",
        block_diffusion, dict(length=15, size=4), dict(length=512, size=32),
    ),
    "flamingo": Exhibit(
        "Text attends to the images that it is about.",
        flamingo, dict(text=12, image=3, intervals=[[0, 7], [1, 7], [7, 12]]),
        dict(text=512, image=64, intervals=[[0, 150], [100, 300], [150, 310], [310, 512]]),
    ),
    "natten": Exhibit(
        "Each pixel attends to its neighbours in two dimensions.",
        natten, dict(height=7, width=9, kernel=3), dict(height=32, width=32, kernel=7),
    ),
    "natten, wide": Exhibit(
        "The same for rows of pixels that span several tiles.",
        natten, dict(height=5, width=11, kernel=5), dict(height=12, width=128, kernel=3),
    ),
    "sliding tiles 2d": Exhibit(
        "STA: tiles of an image attend to whole tiles nearby; text tokens are global.",
        sliding_tiles, dict(canvas=(6, 9), kernel=(4, 3), tile=(2, 3), text=5),
        dict(canvas=(32, 48), kernel=(12, 24), tile=(4, 8), text=32),
    ),
    "sliding tiles 3d": Exhibit(
        "STA: tiles of a video attend to whole tiles nearby.",
        sliding_tiles, dict(canvas=(3, 4, 4), kernel=(3, 2, 2), tile=(1, 2, 2), text=3),
        dict(canvas=(8, 16, 16), kernel=(6, 12, 12), tile=(2, 4, 4), text=0),
    ),
    "sparse video gen": Exhibit(
        "SVG: one head attends to frames nearby, another to the same place in all frames.",
        sparse_video_gen, dict(prompt=3, frames=5, per_frame=7, width=2),
        dict(prompt=32, frames=4, per_frame=256, width=1), slack=1.05,
    ),
    "chosen blocks": Exhibit(
        "VSA: each block of queries reads the blocks with the highest scores.",
        chosen_blocks, dict(blocks=7, size=5, chosen=2), dict(blocks=32, size=32, chosen=4),
    ),
    "tree": Exhibit(
        "Drafted tokens attend to the prefix and to their ancestors.",
        tree, dict(prefix=6, parents=(-1, 0, 1, 1, 3, 3, 0)), dict(prefix=512, parents=EVERY_FOURTH),
    ),
    "draft training": Exhibit(
        "Sampled blocks attend to a prefix, and causally to themselves.",
        draft_training, dict(prefix=5, blocks=3, size=4), dict(prefix=128, blocks=12, size=32),
    ),
}  # fmt: skip


class Scored(NamedTuple):
    """One change of the scores: the arguments of `attention`, and a Python function of one score."""

    sentence: str
    arguments: Callable[[int], dict]  # of the number of heads
    score: Callable[[float, int, int, int], float]  # of the raw score, the head, query and key


def slopes(heads: int) -> np.ndarray:
    return (2.0 ** (-8.0 * (np.arange(heads) + 1) / heads)).astype(np.float32)


def offsets(heads: int) -> np.ndarray:
    return np.linspace(-1, 1, heads * 7, dtype=np.float32).reshape(heads, 7)


def bucketed(heads: int) -> np.ndarray:
    return np.sin(np.arange(8 * heads, dtype=np.float32)).reshape(8, heads)


def bucket(distance: int) -> int:
    """One of eight buckets: four for keys after the query; exact up to distance 1, then logarithmic up to 16."""
    later, far = 4 * (distance > 0), abs(distance)
    return later + (far if far < 2 else min(3, 2 + int(np.log(far / 2) / np.log(16 / 2) * 2)))


# Score mods that multiply, such as a checkerboard, are not biases and have no counterpart.
SCORES = {
    "ALiBi": Scored(
        "Scores decrease with the distance, with one slope per head.",
        lambda heads: dict(bias=ls.alibi(slopes(heads))),
        lambda s, h, q, k: s - slopes(2)[h] * abs(q - k),
    ),
    "relative position": Scored(
        "The distance itself is added.",
        lambda heads: dict(bias=ls.ScoreBias(lambda q, k: q - k), scale=2.0),
        lambda s, h, q, k: 2 * np.sqrt(5) * s + (q - k),
    ),
    "T5 buckets": Scored(
        "A learned number for each head and bucket of distances.",
        lambda heads: dict(bias=ls.relative_bias(bucketed(heads), max_distance=16)),
        lambda s, h, q, k: s + bucketed(2)[bucket(k - q), h],
    ),
    "head bias": Scored(
        "A number for each head and key, here by its remainder.",
        lambda heads: dict(bias=ls.ScoreBias(lambda b, h, q, k, table: table[h, k % 7], offsets(heads))),
        lambda s, h, q, k: s + offsets(2)[h, k % 7],
    ),
    "soft cap": Scored(
        "Scores are capped by tanh, before any bias.",
        lambda heads: dict(soft_cap=2.0, bias=ls.alibi(slopes(heads))),
        lambda s, h, q, k: 2 * np.tanh(s / 2) - slopes(2)[h] * abs(q - k),
    ),
}
