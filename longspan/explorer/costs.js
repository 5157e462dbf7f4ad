// The cost of one call with the document's sizes, as `explain` computes it.

function costsOf(page, tiles, pairs) {
  const { batch, heads, kv_heads: kvHeads, head_dim: dim, itemsize } = page.sizes;
  const perPair = 4 * dim * batch * heads;
  const executed = tiles.q_tile * tiles.kv_tile * (tiles.partial + tiles.full);
  const lse = Math.max(itemsize, 4) * batch * page.q_len * heads;
  return {
    pairs,
    useful_flops: pairs === null ? null : perPair * pairs,
    executed_flops: perPair * executed,
    array_bytes: itemsize * batch * 2 * dim * (page.q_len * heads + page.kv_len * kvHeads) + lse,
    dense_mask_bytes: page.q_len * page.kv_len,
  };
}
