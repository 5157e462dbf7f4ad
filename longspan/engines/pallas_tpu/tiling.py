"""The tiles of a call on a chip: the fastest by the static model of `chips` whose kernels fit VMEM.

A visit computes all query heads that share a key/value head, so the rows of a visit are q_tile times their number.
"""

from longspan.engines.pallas_tpu.chips import TpuChip
from longspan.engines.pallas_tpu.sizes import LANES, fits
from longspan.engines.request import Request

INTERPRETED_TILE = 128
DECODED = 16  # a call with at most this many queries is a step of decoding
DECODED_KEYS = 1024
LEAST_KEYS = 256  # smaller tiles are slower than keys that are padded


def tiles_for(request: Request, chip: TpuChip, *, fused: bool) -> tuple[int, int]:
    """(q_tile, kv_tile) of a call on a chip."""
    dims, group = request.dims, 1
    if request.mask.heads == 1 and request.bias is None:
        group = dims["N"] // dims["K"]
    candidates = [(q, kv) for q in _q_tiles(dims["T"], chip.q_rows // group) for kv in _kv_tiles(dims, chip.keys)]

    def bundles_per_pair(tiles: tuple[int, int]) -> float:
        # Forward, all query heads of a row are computed at once; backward, one after the other.
        q_tile, keys = tiles
        return sum(chip.visit_bundles(rows, keys)[0] / (rows * keys) for rows in (group * q_tile, q_tile))

    best = candidates[0]
    if fits(request, chip, *best, fused=fused):
        return best
    for tiles in sorted(candidates[1:], key=bundles_per_pair):
        if fits(request, chip, *tiles, fused=fused):
            return tiles
    return candidates[-1]


def _q_tiles(q_len: int, preferred: int) -> list[int]:
    """Query tiles, the preferred one first: multiples of 128, then parts of 128, down to 16 queries."""
    whole = -(-q_len // LANES) * LANES
    first = min(max(preferred // LANES * LANES, LANES), whole)
    found = [tile for tile in (first, first // 2, first // 4) if tile % LANES == 0]
    found = [tile for tile in (*found, 128, 64, 32, 16) if tile <= first]
    if q_len < LANES:
        found = [min(tile, -(-q_len // 16) * 16) for tile in found]
    return list(dict.fromkeys(found))


def _kv_tiles(dims: dict[str, int], preferred: int) -> list[int]:
    """Key tiles, the preferred one first: tiles that divide the keys, so that these need no padding.

    A step of decoding reads a cache in place if its tiles fill it, so it always takes a tile that divides the keys.
    """
    S, least = dims["S"], LEAST_KEYS
    if dims["T"] <= DECODED:
        preferred, least = DECODED_KEYS, LANES
    dividing = [tile for tile in range(preferred, 0, -LANES) if S % tile == 0]
    if dividing and (dividing[0] >= least or least > S):
        return dividing
    first = min(preferred, -(-S // LANES) * LANES)
    if dims["T"] <= DECODED:
        first = min(first, 512)
    return [tile for tile in (first, 256, 128) if tile <= first]
