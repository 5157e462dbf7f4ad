// Where two masks differ.

const MAX_COMPARED = 2 ** 25; // pairs that one search reads

// The rule that allows the pairs that exactly one of two rules allows.
function differenceRule(a, b) {
  return new OrRule([new AndRule([a, new NotRule(b)]), new AndRule([new NotRule(a), b])]);
}

// {same, pair: {q, k, allowed_by} or null, complete}: the first differing pair after query `q` and key `k`, in the order
// of queries and then keys. `same` is whether there is no differing pair at all; null if the search was not complete.
function findDifference(shown, compared, q, k) {
  const rule = differenceRule(shown.rule, compared.rule);
  shown.differing ??= countsByQuery(shown, rule);
  const search = { read: 0, unknown: false };
  const pair = shown.differing ? nextCounted(shown, rule, q, k, search) : nextPair(shown, rule, q, k, search);
  const complete = !search.unknown;
  if (pair === null) return { same: q < 0 && complete ? true : null, pair: null, complete };
  const [row, column] = pair;
  return { same: false, pair: { q: row, k: column, allowed_by: shown.allowed(row, column) ? "first" : "second" }, complete };
}

// The next differing pair, where the number of differing keys of each query is known.
function nextCounted({ differing, kv }, rule, q, k, search) {
  let pair = null;
  if (q >= 0 && differing[q]) pair = firstPair(rule, q, q + 1, k + 1, kv.length, search);
  for (let row = q + 1; pair === null && row < differing.length; row++) {
    if (differing[row]) pair = firstPair(rule, row, row + 1, 0, kv.length, search);
  }
  return pair;
}

function nextPair({ q: queries, kv }, rule, q, k, search) {
  let pair = null;
  if (q >= 0) pair = firstPair(rule, q, q + 1, k + 1, kv.length, search);
  return pair ?? firstPair(rule, q + 1, queries.length, 0, kv.length, search);
}

// The first pair of a rectangle that a rule allows: halves the queries, then the keys.
function firstPair(rule, q0, q1, k0, k1, search) {
  if (!hasPair(rule, q0, q1, k0, k1, search)) return null;
  while (q1 - q0 > 1) {
    const middle = (q0 + q1) >> 1;
    if (hasPair(rule, q0, middle, k0, k1, search)) q1 = middle;
    else q0 = middle;
  }
  while (k1 - k0 > 1) {
    const middle = (k0 + k1) >> 1;
    if (hasPair(rule, q0, q1, k0, middle, search)) k1 = middle;
    else k0 = middle;
  }
  return rule.allowed(q0, k0) === true ? [q0, k0] : null;
}

// Whether a rule is known to allow a pair of a rectangle.
function hasPair(rule, q0, q1, k0, k1, search) {
  if (q0 >= q1 || k0 >= k1) return false;
  const kind = rule.classify(q0, q1, k0, k1);
  if (!(kind & ANY)) return false;
  if (kind & ALL) return true;
  if (search.read > MAX_COMPARED) {
    search.unknown = true;
    return false;
  }
  if (q1 - q0 <= LEAF && k1 - k0 <= LEAF) return readPairs(rule, q0, q1, k0, k1, search);
  const q = q1 - q0 > LEAF ? (q0 + q1) >> 1 : q1;
  const k = k1 - k0 > LEAF ? (k0 + k1) >> 1 : k1;
  return (
    hasPair(rule, q0, q, k0, k, search) ||
    hasPair(rule, q0, q, k, k1, search) ||
    hasPair(rule, q, q1, k0, k, search) ||
    hasPair(rule, q, q1, k, k1, search)
  );
}

function readPairs(rule, q0, q1, k0, k1, search) {
  search.read += (q1 - q0) * (k1 - k0);
  for (let q = q0; q < q1; q++) {
    for (let k = k0; k < k1; k++) {
      const truth = rule.allowed(q, k);
      if (truth) return true;
      search.unknown ||= truth === null;
    }
  }
  return false;
}
