// The tiles that engines visit, by kind, as `mask.layout(...)` and `explain` count them.

const SHORT_RUN = 512; // tiles that are classified one by one if the run is PARTIAL as a whole

// Disjoint intervals of key tiles per row: {count, starts, stops, common}, where `common` lists the key tiles that every
// row visits in addition.
function layoutOf(program, qTile, kvTile) {
  const tiling = tilingOf(program, qTile, kvTile);
  program.asEngine = true;
  const spans = spansOf(program.rule, tiling);
  program.asEngine = false;
  const { rows, columns } = tiling;
  const { count } = spans;
  const starts = new Int32Array(rows * count);
  const stops = new Int32Array(rows * count);
  for (let row = 0; row < rows; row++) {
    const intervals = [];
    for (let i = row * count; i < (row + 1) * count; i++) {
      const low = clamp(spans.low[i], 0, columns * kvTile);
      const high = clamp(spans.high[i], 0, columns * kvTile);
      intervals.push(low >= high ? [columns, columns] : [floorDivide(low, kvTile), Math.ceil(high / kvTile)]);
    }
    intervals.sort((a, b) => a[0] - b[0]);
    let reached = 0; // an interval begins no earlier than the end of those before it
    intervals.forEach(([start, stop], i) => {
      const begin = Math.max(start, reached);
      starts[row * count + i] = begin;
      stops[row * count + i] = Math.max(begin, stop);
      reached = Math.max(reached, stop);
    });
  }
  const common = [];
  spans.common?.forEach((listed, column) => listed && common.push(column));
  return { ...tiling, count, starts, stops, common };
}

// {total, visited, empty, partial, full}: `empty` counts all tiles without an allowed pair, visited or not.
function countTiles(program, qTile, kvTile) {
  const layout = layoutOf(program, qTile, kvTile);
  const found = { total: layout.rows * layout.columns, visited: 0, empty: 0, partial: 0, full: 0 };
  program.asEngine = true;
  for (let row = 0; row < layout.rows; row++) {
    for (let i = row * layout.count; i < (row + 1) * layout.count; i++) {
      countRun(program, layout, row, layout.starts[i], layout.stops[i], found);
    }
    for (const column of layout.common) {
      if (!isVisited(layout, row, column)) countRun(program, layout, row, column, column + 1, found);
    }
  }
  program.asEngine = false;
  found.empty = found.total - found.partial - found.full;
  return found;
}

// A function that returns the kind of the tile of a row and a column, as `countTiles` counts it: 0 if engines skip it.
function tileKinds(program, qTile, kvTile) {
  const layout = layoutOf(program, qTile, kvTile);
  const common = new Set(layout.common);
  return (row, column) => {
    if (!common.has(column) && !isVisited(layout, row, column)) return 0;
    program.asEngine = true;
    const kind = classifyRun(program, layout, row, column, column + 1);
    program.asEngine = false;
    return kind;
  };
}

function isVisited(layout, row, column) {
  for (let i = row * layout.count; i < (row + 1) * layout.count; i++) {
    if (layout.starts[i] <= column && column < layout.stops[i]) return true;
  }
  return false;
}

// Counts the tiles [first, last) of a row by kind. A run that is EMPTY or FULL as a whole is not split.
function countRun(program, layout, row, first, last, found) {
  if (first >= last) return;
  const count = last - first;
  const isShort = count <= SHORT_RUN;
  if (count === 1 || program.rule.isMonotone) {
    const kind = classifyRun(program, layout, row, first, last);
    if (count === 1 || kind !== ANY) {
      found.visited += count;
      if (kind === ANY) found.partial += 1;
      if (kind & ALL) found.full += count;
      return;
    }
  }
  if (isShort) {
    for (const kind of kindsOfRow(program.rule, layout, row, first, last)) {
      found.visited += 1;
      if (kind === ANY) found.partial += 1;
      if (kind & ALL) found.full += 1;
    }
    return;
  }
  const middle = (first + last) >> 1;
  countRun(program, layout, row, first, middle, found);
  countRun(program, layout, row, middle, last, found);
}

function classifyRun(program, layout, row, first, last) {
  const { qTile, kvTile, q, kv } = layout;
  const stop = Math.min((row + 1) * qTile, q.length);
  return program.rule.classify(row * qTile, stop, first * kvTile, Math.min(last * kvTile, kv.length));
}
