// Spans: the intervals of key slots that cover what each tile of queries may see, as `Mask.kv_spans` computes them. From
// them follow the tiles that engines visit.
//
// Spans are {count, low, high, common}: `count` intervals [low, high) per row of tiles, at `row * count + i`, and the key
// tiles that every row visits (bytes), or null.

const NO_SLOT = MOST; // where an interval without slots begins
const MAX_INTERVALS = 64;

// The tiles of both sides: {rows, qTile, kvTile, columns, q, kv}.
function tilingOf(program, qTile, kvTile) {
  const { q, kv } = program;
  const rows = Math.ceil(q.length / qTile);
  const columns = Math.ceil(kv.length / kvTile);
  return { rows, columns, qTile, kvTile, q, kv };
}

const rowStart = (tiling, row) => row * tiling.qTile;
const rowStop = (tiling, row) => Math.min((row + 1) * tiling.qTile, tiling.q.length);

function newSpans(tiling, count) {
  const size = tiling.rows * count;
  return { count, low: new Float64Array(size), high: new Float64Array(size), common: null };
}

function spansOf(rule, tiling) {
  if (rule instanceof AndRule) return rule.parts.map((part) => spansOf(part, tiling)).reduce((a, b) => intersect(tiling, a, b));
  if (rule instanceof OrRule) return rule.parts.map((part) => spansOf(part, tiling)).reduce((a, b) => unite(tiling, a, b));
  if (rule instanceof CompareRule) return spansOfCompare(rule, tiling);
  if (rule instanceof BlocksRule) return spansOfBlocks(rule, tiling);
  if (rule instanceof DenseRule) return spansOfDense(rule, tiling);
  if (rule instanceof CellsRule && rule.bounded) return spansOfCells(rule, tiling);
  if (rule instanceof ConstantRule && !rule.truth) return newSpans(tiling, 1);
  return everything(tiling);
}

function everything(tiling) {
  return byRow(tiling, () => [0, tiling.kv.length]);
}

// One interval per row of tiles.
function byRow(tiling, interval) {
  const spans = newSpans(tiling, 1);
  for (let row = 0; row < tiling.rows; row++) {
    [spans.low[row], spans.high[row]] = interval(rowStart(tiling, row), rowStop(tiling, row));
  }
  return spans;
}

function unite(tiling, a, b) {
  const spans = newSpans(tiling, a.count + b.count);
  for (let row = 0; row < tiling.rows; row++) {
    for (const key of ["low", "high"]) {
      spans[key].set(a[key].subarray(row * a.count, (row + 1) * a.count), row * spans.count);
      spans[key].set(b[key].subarray(row * b.count, (row + 1) * b.count), row * spans.count + a.count);
    }
  }
  return { ...spans, common: either(a.common, b.common) };
}

function either(a, b) {
  if (a === null || b === null) return a ?? b;
  return a.map((listed, i) => listed | b[i]);
}

function intersect(tiling, a, b) {
  // A key seen by both lies in an interval of each, or in a common tile of one of them.
  const common = either(a.common, b.common);
  if (a.count * b.count > MAX_INTERVALS) {
    const [few, many] = b.count < a.count ? [b, a] : [a, b];
    return { ...clipped(tiling, few, many), common };
  }
  const spans = newSpans(tiling, a.count * b.count);
  let at = 0;
  for (let row = 0; row < tiling.rows; row++) {
    for (let i = row * a.count; i < (row + 1) * a.count; i++) {
      for (let j = row * b.count; j < (row + 1) * b.count; j++, at++) {
        spans.low[at] = Math.max(a.low[i], b.low[j]);
        spans.high[at] = Math.min(a.high[i], b.high[j]);
      }
    }
  }
  return { ...spans, common };
}

// The intervals of `few`, cut to the range from the first slot of `many` to the last.
function clipped(tiling, few, many) {
  const spans = newSpans(tiling, few.count);
  for (let row = 0; row < tiling.rows; row++) {
    let first = NO_SLOT;
    let last = 0;
    for (let i = row * many.count; i < (row + 1) * many.count; i++) {
      if (many.low[i] >= many.high[i]) continue;
      first = Math.min(first, many.low[i]);
      last = Math.max(last, many.high[i]);
    }
    for (let i = row * few.count; i < (row + 1) * few.count; i++) {
      spans.low[i] = Math.max(few.low[i], first);
      spans.high[i] = Math.min(few.high[i], last);
    }
  }
  return spans;
}

function spansOfCompare(rule, tiling) {
  const { q: row, kv: other, relation } = rule;
  if (relation === "==" && row.of === "array" && other.of === "array") {
    if (row.isStaticArray && other.isStaticArray && !row.byHead && !other.byHead) return hullOfEquals(rule, tiling);
  }
  if (other.of === "number") {
    const length = tiling.kv.length;
    return byRow(tiling, (start, stop) => [0, isInside(other.constant, boundsOf(rule, start, stop)) ? length : 0]);
  }
  if (rule.few && row.of === "number") return { ...newSpans(tiling, 1), common: commonTiles(rule, tiling) };
  if (other.of === "array") return hullBetween(rule, tiling);
  if (!other.grows) return everything(tiling);
  return byRow(tiling, (start, stop) => {
    const [low, high] = other.inverse(...boundsOf(rule, start, stop));
    if (other.of === "slot") return slotsBetween(tiling.kv.length, low, high);
    return tiling.kv.between(low, high);
  });
}

const isInside = (value, [low, high]) => low <= value && value <= high;

// The range of the key term that a run of queries may see.
function boundsOf({ q, relation }, start, stop) {
  let low = -Infinity;
  let high = Infinity;
  q.range(start, stop);
  if (relation === "==" || relation === "<=") low = q.low;
  if (relation === "==" || relation === ">=") high = q.high;
  if (relation === "<") low = Math.min(q.low, MOST - 1) + 1;
  if (relation === ">") high = Math.max(q.high, LEAST + 1) - 1;
  return [low, high];
}

// The key tiles of which some key may be seen by all queries: `few` scattered ones.
function commonTiles(rule, tiling) {
  const common = new Uint8Array(tiling.columns);
  const bounds = boundsOf(rule, 0, 1);
  for (let column = 0; column < tiling.columns; column++) {
    rule.kv.range(column * tiling.kvTile, Math.min((column + 1) * tiling.kvTile, tiling.kv.length));
    common[column] = Number(rule.kv.low <= bounds[1] && rule.kv.high >= bounds[0]);
  }
  return common;
}

// From the first to the last key whose entry equals one of a tile's queries.
function hullOfEquals(rule, tiling) {
  const firstOf = new Map();
  const lastOf = new Map();
  for (let k = 0; k < tiling.kv.length; k++) {
    const id = rule.kv.value(k);
    if (!firstOf.has(id)) firstOf.set(id, k);
    lastOf.set(id, k);
  }
  return byRow(tiling, (start, stop) => {
    let low = NO_SLOT;
    let high = 0;
    for (let q = start; q < stop; q++) {
      const id = rule.q.value(q);
      if (!rule.q.defined(q) || !firstOf.has(id)) continue;
      low = Math.min(low, firstOf.get(id));
      high = Math.max(high, lastOf.get(id) + 1);
    }
    return low < high ? [low, high] : [0, 0];
  });
}

// The intersection of two hulls: of the keys whose number is at most a bound, and of those whose number is at least one.
function hullBetween(rule, tiling) {
  const { kv: term } = rule;
  const length = tiling.kv.length;
  if (!term.isStaticArray) return everything(tiling);
  const upper = (sign) => runningLeast(length, (k) => (term.defined(k) ? sign(term.value(k)) : MOST));
  const atMost = upper((value) => value);
  const atLeast = upper((value) => ~value); // ~x decreases as x grows
  return byRow(tiling, (start, stop) => {
    const [low, high] = boundsOf(rule, start, stop);
    let first = 0;
    let last = length;
    for (const [least, bound] of [[atMost, high], [atLeast, -low - 1]]) {
      if (bound === Infinity) continue;
      first = Math.max(first, length - bisect(least.fromLeft, bound, "right"));
      last = Math.min(last, bisect(least.fromRight, bound, "right"));
    }
    return [Math.min(first, last), last];
  });
}

// The least number up to each slot, in reverse so that it grows, and the least one from each slot on.
function runningLeast(length, numberOf) {
  const fromLeft = new Float64Array(length);
  const fromRight = new Float64Array(length);
  let least = Infinity;
  for (let k = 0; k < length; k++) fromLeft[length - 1 - k] = least = Math.min(least, numberOf(k));
  least = Infinity;
  for (let k = length - 1; k >= 0; k--) fromRight[k] = least = Math.min(least, numberOf(k));
  return { fromLeft, fromRight };
}

function spansOfBlocks(rule, tiling) {
  const { unit, columns: width } = rule;
  const length = tiling.kv.length;
  const perTile = Math.min(floorDivide(tiling.qTile - 1 + unit - 1, unit) + 1, Math.max(Math.ceil(tiling.q.length / unit), 1));
  const count = perTile * width;
  if (count === 0 || count > MAX_INTERVALS) {
    return byRow(tiling, (start, stop) => {
      const top = rule.row(floorDivide(start, unit));
      const bottom = rule.row(floorDivide(stop - 1, unit)) + 1;
      const first = width ? rule.first.least(top, bottom) : MOST;
      return first === MOST ? [0, 0] : [first * unit, Math.min((rule.last.greatest(top, bottom) + 1) * unit, length)];
    });
  }
  const spans = newSpans(tiling, count);
  for (let row = 0; row < tiling.rows; row++) {
    const first = floorDivide(rowStart(tiling, row), unit);
    const last = floorDivide(rowStop(tiling, row) - 1, unit);
    for (let i = 0; i < perTile && first + i <= last; i++) {
      for (let j = 0; j < width; j++) {
        const block = rule.table[rule.row(first + i) * width + j];
        const at = row * count + i * width + j;
        if (block < 0) continue;
        spans.low[at] = block * unit;
        spans.high[at] = Math.min((block + 1) * unit, length);
      }
    }
  }
  return spans;
}

function spansOfDense(rule, tiling) {
  const length = tiling.kv.length;
  if (!rule.rows || !rule.columns) return newSpans(tiling, 1);
  const hulls = [];
  for (let row = 0; row < rule.rows; row++) hulls.push(hullOfRow(rule, row, length));
  return byRow(tiling, (start, stop) => {
    let low = NO_SLOT;
    let high = 0;
    const [first, last] = rule.isBroadcast(0) ? [0, 1] : [start - (rule.offsets[0] ?? 0), stop - (rule.offsets[0] ?? 0)];
    for (let row = Math.max(first, 0); row < Math.min(last, rule.rows); row++) {
      low = Math.min(low, hulls[row][0]);
      high = Math.max(high, hulls[row][1]);
    }
    return [Math.min(low, high), high];
  });
}

// From the first to the last key that a row of an array allows.
function hullOfRow(rule, row, length) {
  const shift = rule.offsets[1] ?? 0;
  let low = NO_SLOT;
  let high = 0;
  for (let column = 0; column < rule.columns; column++) {
    const slot = column + shift;
    if (!rule.bools[row * rule.columns + column] || (rule.offsets[1] !== null && (slot < 0 || slot >= length))) continue;
    low = Math.min(low, slot);
    high = slot + 1;
  }
  if (rule.isBroadcast(1) && high) high = length;
  return [low, high];
}

// From the first to the last cell of keys in which Python found an allowed pair. Engines read the rule's own bounds.
function spansOfCells(rule, tiling) {
  const [height, width] = rule.sizes;
  const hulls = [];
  for (let row = 0; row < rule.some.rows; row++) hulls.push(hullOfRow(rule.some, row, rule.some.columns));
  return byRow(tiling, (start, stop) => {
    let low = NO_SLOT;
    let high = 0;
    for (let row = floorDivide(start, height); row <= floorDivide(stop - 1, height); row++) {
      low = Math.min(low, hulls[row][0]);
      high = Math.max(high, hulls[row][1]);
    }
    return [Math.min(low, high) * width, high * width];
  });
}
