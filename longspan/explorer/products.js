// The number of allowed pairs, query by query, if rules are intervals of keys, equal ids or flagged keys; as
// `count_by_query` in `pairs.py`.
//
// Let an allowed pair be 1 and any other pair 0. Then `a & b` is a·b, `~a` is 1 - a and `a | b` is 1 - (1 - a)·(1 - b), so
// every composition is a sum of products. A sum is a Map from a product, its sorted rules, to its coefficient.

const MAX_PRODUCTS = 64;
const MAX_LISTED = 2 ** 24; // tokens whose intervals are listed

// The exact number of keys that each query may see by a rule; null if a part of it is no interval, id or flag.
function countsByQuery(program, rule) {
  const { q, kv } = program;
  if (Math.max(q.length, kv.length) > MAX_LISTED) return null;
  const known = new Map(); // the index of each rule, by its text
  const pieces = [];
  const order = kv.grows ? null : sortedOrder(kv.positions);
  const sum = sumOf(rule, (part) => {
    const text = textOfRule(part);
    if (!known.has(text)) {
      const piece = pieceOf(part, q, kv, order);
      if (piece === null) return null;
      known.set(text, pieces.length);
      pieces.push(piece);
    }
    return known.get(text);
  });
  if (sum === null) return null;
  const joined = new Map();
  const counts = new Float64Array(q.length);
  for (const [product, coefficient] of sum) {
    const factors = product === "" ? [] : product.split(",").map(Number);
    addProduct(counts, coefficient, factors, pieces, kv.length, joined);
  }
  return counts;
}

// Equal comparisons have one text, also those of different masks.
function textOfRule(rule) {
  const textOfTerm = (term) =>
    [term.of, term.index, term.constant, term.members, term.divisor, term.round, term.shift, term.clips, term.validName].join();
  return [rule.relation, textOfTerm(rule.q), textOfTerm(rule.kv)].join(";");
}

// A rule as a sum of products; null if a part of it has no index, or if there are too many products.
function sumOf(rule, indexOf) {
  if (rule instanceof ConstantRule) return rule.truth ? new Map([["", 1]]) : new Map();
  if (rule instanceof NotRule) return withoutSum(sumOf(rule.part, indexOf));
  if (rule instanceof AndRule || rule instanceof OrRule) {
    const isOr = rule instanceof OrRule;
    let total = new Map([["", 1]]);
    for (const part of rule.parts) {
      let known = sumOf(part, indexOf);
      if (isOr) known = withoutSum(known);
      total = productOf(total, known);
      if (total === null) return null;
    }
    return isOr ? withoutSum(total) : total;
  }
  if (!(rule instanceof CompareRule)) return null;
  const index = indexOf(rule);
  return index === null ? null : new Map([[String(index), 1]]);
}

// 1 - a.
function withoutSum(a) {
  if (a === null) return null;
  const found = new Map([["", 1]]);
  for (const [product, coefficient] of a) addTo(found, product, -coefficient);
  return found;
}

function productOf(a, b) {
  if (a === null || b === null) return null;
  const found = new Map();
  for (const [p, m] of a) {
    for (const [r, n] of b) {
      const both = new Set([...p.split(","), ...r.split(",")].filter((index) => index !== ""));
      addTo(found, [...both].sort().join(","), m * n);
    }
  }
  return found.size > MAX_PRODUCTS ? null : found;
}

function addTo(sum, product, coefficient) {
  const total = (sum.get(product) ?? 0) + coefficient;
  if (total) sum.set(product, total);
  else sum.delete(product);
}

// The pairs of a comparison, each part null if it is no condition: {low, high}: an interval of keys for each query, of the
// keys in their order by position; {qIds, kvIds}: ids that must be equal; {flags}: keys. Null if it is none of these.
function pieceOf(rule, q, kv, order) {
  const piece = { low: null, high: null, qIds: null, kvIds: null, flags: null };
  const [mine, theirs] = [rule.q, rule.kv];
  const slot = (i) => (order ? order[i] : i);
  if (rule.relation === "==" && !(mine.grows && theirs.grows)) {
    piece.qIds = Float64Array.from({ length: q.length }, (_, i) => (mine.defined(i) ? mine.value(i) : NaN));
    piece.kvIds = Float64Array.from({ length: kv.length }, (_, i) => (theirs.defined(slot(i)) ? theirs.value(slot(i)) : NaN));
    return piece;
  }
  if (mine.of === "number") {
    return { ...piece, flags: Uint8Array.from({ length: kv.length }, (_, i) => Number(rule.allowed(0, slot(i)))) };
  }
  if (theirs.of === "number") return { ...piece, ...intervals(q, (i) => [0, rule.allowed(i, 0) ? kv.length : 0]) };
  if (!theirs.grows || (theirs.of === "slot" && order)) return null;
  const sorted = theirs.of === "slot" ? null : order ? Int32Array.from(order, (i) => kv.positions[i]) : kv.positions;
  return { ...piece, ...intervals(q, (i) => keysOf(rule, i, kv.length, sorted)) };
}

// The keys that a query may see by one comparison, where `sorted` are the keys' positions, or null.
function keysOf(rule, i, length, sorted) {
  if (!rule.q.defined(i)) return [0, 0];
  const [low, high] = rule.kv.inverse(...boundsOf(rule, i, i + 1));
  if (sorted) return [bisect(sorted, low), bisect(sorted, high, "right")];
  return slotsBetween(length, low, high);
}

function intervals(q, interval) {
  const low = new Int32Array(q.length);
  const high = new Int32Array(q.length);
  for (let i = 0; i < q.length; i++) [low[i], high[i]] = interval(i);
  return { low, high };
}

function sortedOrder(positions) {
  return Int32Array.from(positions.keys()).sort((a, b) => positions[a] - positions[b] || a - b);
}

// Adds to the number of keys of each query those in all factors of a product, times a coefficient. `joined` has the
// classes of keys with equal ids, for other products.
function addProduct(counts, coefficient, factors, pieces, kvLength, joined) {
  const used = factors.map((factor) => pieces[factor]);
  const bounds = used.filter((piece) => piece.low);
  const flags = allFlags(used.filter((piece) => piece.flags), kvLength);
  const equal = factors.filter((factor) => pieces[factor].qIds);
  let count;
  if (equal.length) {
    const name = equal.join(",");
    if (!joined.has(name)) joined.set(name, jointIds(equal.map((factor) => pieces[factor])));
    const { ofQueries, ofKeys, classes } = joined.get(name);
    count = countInClasses(ofQueries, groupKeys(ofKeys, classes, flags));
  } else if (flags) {
    const before = new Int32Array(kvLength + 1);
    for (let k = 0; k < kvLength; k++) before[k + 1] = before[k] + flags[k];
    count = (i, low, high) => before[high] - before[low];
  } else {
    count = (i, low, high) => high - low;
  }
  for (let i = 0; i < counts.length; i++) {
    let low = 0;
    let high = kvLength;
    for (const piece of bounds) {
      low = Math.max(low, piece.low[i]);
      high = Math.min(high, piece.high[i]);
    }
    if (low < high) counts[i] += coefficient * count(i, low, high);
  }
}

function allFlags(pieces, length) {
  if (!pieces.length) return null;
  const flags = new Uint8Array(length).fill(1);
  for (const piece of pieces) {
    for (let k = 0; k < length; k++) flags[k] &= piece.flags[k];
  }
  return flags;
}

// Classes of tokens whose ids are equal in every piece: the class of each query and key, -1 for none.
function jointIds(pieces) {
  let ofQueries = null;
  let ofKeys = null;
  let classes = 1;
  for (const { qIds, kvIds } of pieces) {
    const known = new Map();
    const named = (ids, before, add) => {
      const found = new Int32Array(ids.length);
      const step = classes;
      for (let i = 0; i < ids.length; i++) {
        const earlier = before ? before[i] : 0;
        found[i] = -1;
        if (earlier < 0 || Number.isNaN(ids[i])) continue;
        const name = ids[i] * step + earlier;
        if (add && !known.has(name)) known.set(name, known.size);
        found[i] = known.get(name) ?? -1;
      }
      return found;
    };
    ofKeys = named(kvIds, ofKeys, true);
    ofQueries = named(qIds, ofQueries, false);
    classes = known.size;
  }
  return { ofQueries, ofKeys, classes };
}

// The flagged keys of each class, in order: class c has `keys[starts[c]]` to `keys[starts[c + 1] - 1]`.
function groupKeys(ofKeys, classes, flags) {
  const starts = new Int32Array(classes + 1);
  const isIn = (k) => ofKeys[k] >= 0 && (!flags || flags[k]);
  for (let k = 0; k < ofKeys.length; k++) if (isIn(k)) starts[ofKeys[k] + 1]++;
  for (let c = 0; c < classes; c++) starts[c + 1] += starts[c];
  const next = starts.slice();
  const keys = new Int32Array(starts[classes]);
  for (let k = 0; k < ofKeys.length; k++) if (isIn(k)) keys[next[ofKeys[k]]++] = k;
  return { starts, keys };
}

// A function of a query and an interval: the number of keys in the interval that have the query's class.
function countInClasses(ofQueries, { starts, keys }) {
  return (i, low, high) => {
    const own = ofQueries[i];
    if (own < 0) return 0;
    return placeOf(keys, high, starts[own], starts[own + 1]) - placeOf(keys, low, starts[own], starts[own + 1]);
  };
}

// The first index from `first` to `stop` whose entry is at least a value.
function placeOf(sorted, value, first, stop) {
  while (first < stop) {
    const middle = (first + stop) >> 1;
    if (sorted[middle] < value) first = middle + 1;
    else stop = middle;
  }
  return first;
}
