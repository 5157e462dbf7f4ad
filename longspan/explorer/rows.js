// The kinds of neighbouring tiles of one row. The bounds of the keys of each column of tiles are computed once.

// The kinds of the tiles [first, last) of a row of tiles, as `classify` gives them one by one.
function kindsOfRow(rule, layout, row, first, last) {
  if (rule instanceof AndRule || rule instanceof OrRule) {
    const isAnd = rule instanceof AndRule;
    const found = kindsOfRow(rule.parts[0], layout, row, first, last);
    for (const part of rule.parts.slice(1)) {
      const kinds = kindsOfRow(part, layout, row, first, last);
      for (let i = 0; i < found.length; i++) found[i] = isAnd ? found[i] & kinds[i] : found[i] | kinds[i];
    }
    return found;
  }
  if (rule instanceof NotRule) {
    // Not EMPTY is FULL, not FULL is EMPTY, and not PARTIAL is PARTIAL.
    return kindsOfRow(rule.part, layout, row, first, last).map((kind) => (kind & ALL ? 0 : ANY) | (kind & ANY ? 0 : ALL));
  }
  if (rule instanceof CompareRule && !rule.isStrided) return kindsOfComparison(rule, layout, row, first, last);
  const { qTile, kvTile, q, kv } = layout;
  const stop = Math.min((row + 1) * qTile, q.length);
  const found = new Uint8Array(last - first);
  for (let column = first; column < last; column++) {
    found[column - first] = rule.classify(row * qTile, stop, column * kvTile, Math.min((column + 1) * kvTile, kv.length));
  }
  return found;
}

function kindsOfComparison(rule, layout, row, first, last) {
  const { low, high, total } = boundsOfColumns(rule, layout);
  rule.q.range(row * layout.qTile, Math.min((row + 1) * layout.qTile, layout.q.length));
  const [least, most, isTotal] = [rule.q.low, rule.q.high, rule.q.total];
  const found = new Uint8Array(last - first);
  for (let column = first; column < last; column++) {
    const kind = rule.kindOf(least, most, low[column], high[column]);
    found[column - first] = isTotal && total[column] ? kind : kind & ANY;
  }
  return found;
}

// {low, high, total}: the range of a comparison's key term in each column of tiles.
function boundsOfColumns(rule, { columns, kvTile, kv }) {
  if (rule.columnTile !== kvTile) {
    const bounds = { low: new Float64Array(columns), high: new Float64Array(columns), total: new Uint8Array(columns) };
    for (let column = 0; column < columns; column++) {
      rule.kv.range(column * kvTile, Math.min((column + 1) * kvTile, kv.length));
      bounds.low[column] = rule.kv.low;
      bounds.high[column] = rule.kv.high;
      bounds.total[column] = Number(rule.kv.total);
    }
    rule.columnTile = kvTile;
    rule.columnBounds = bounds;
  }
  return rule.columnBounds;
}
