// `makeExplorer(page)`: everything that the page and scripts ask of a document. Results are plain JSON.

function makeExplorer(page) {
  const arrays = [];
  const initial = page.numbers.map((number) => number.value);
  let numbers = [...initial];
  let shown = new Program(page, page.mask, numbers, arrays);
  const compared = page.other && new Program(page, page.other, numbers, arrays);

  const textOf = (start, stop) => expressionText(page, numbers).slice(...shifted(page, numbers, start, stop));
  const isInitial = () => numbers.every((value, i) => value === initial[i]);
  const checkPair = (q, k) => {
    checkInt("q", q, 0, page.q_len - 1);
    checkInt("k", k, 0, page.kv_len - 1);
  };

  return {
    page,
    get numbers() {
      return [...numbers];
    },
    get text() {
      return expressionText(page, numbers);
    },
    get isInitial() {
      return isInitial();
    },
    // Sets all numbers of the expression; those that are fixed must not change.
    setNumbers(values) {
      checkNumbers(page, values);
      if (values.every((value, i) => value === numbers[i])) return;
      numbers = [...values];
      shown = new Program(page, page.mask, numbers, arrays);
    },
    allowed(q, k) {
      checkPair(q, k);
      return shown.allowed(q, k);
    },
    allowedByOther(q, k) {
      checkPair(q, k);
      return compared.allowed(q, k);
    },
    why(q, k) {
      checkPair(q, k);
      return whyPair(page, shown, compared, q, k, textOf);
    },
    tiles(qTile = 128, kvTile = qTile) {
      checkInt("q_tile", qTile, 1, FAR);
      checkInt("kv_tile", kvTile, 1, FAR);
      return { q_tile: qTile, kv_tile: kvTile, ...countTiles(shown, qTile, kvTile) };
    },
    tileKinds: (qTile, kvTile) => tileKinds(shown, qTile, kvTile),
    count() {
      return countPairs(shown).pairs;
    },
    cache: (t) => cacheAt(page.cache, t, !isInitial()),
    devices: (count, order = "contiguous") => devicesOf(page.devices, count, order, !isInitial()),
    // The first differing pair after (q, k); by default, the first of all.
    diff(q = -1, k = -1) {
      if (!compared) return { same: null, pair: null, complete: false, error: "There is no other mask." };
      checkInt("q", q, -1, page.q_len - 1);
      checkInt("k", k, -1, page.kv_len - 1);
      return findDifference(shown, compared, q, k);
    },
    classify: (q0, q1, k0, k1) => shown.classify(q0, q1, k0, k1),
    // Whether a rectangle is allowed by both masks, by the first only, by the second only: the kind of each.
    classifyDifference(q0, q1, k0, k1) {
      const [a, b] = [shown, compared].map((program) => program.classify(q0, q1, k0, k1));
      const without = (x) => (x & ALL ? 0 : ANY) | (x & ANY ? 0 : ALL);
      return { both: a & b, first: a & without(b), second: b & without(a) };
    },
  };
}

// The document's expression with other numbers.
function expressionText(page, numbers) {
  let text = "";
  let at = 0;
  page.numbers.forEach(({ start, stop }, i) => {
    text += page.mask.text.slice(at, start) + numberText(page, numbers, i);
    at = stop;
  });
  return text + page.mask.text.slice(at);
}

// The document's own text of a number that did not change: JavaScript prints an int beyond 2**53 differently.
function numberText(page, numbers, i) {
  const { value, start, stop } = page.numbers[i];
  return numbers[i] === value ? page.mask.text.slice(start, stop) : String(numbers[i]);
}

// Where a part of the document's expression is in the text with other numbers.
function shifted(page, numbers, start, stop) {
  const moved = (place) =>
    page.numbers.reduce((to, { start, stop }, i) => {
      return stop <= place ? to + numberText(page, numbers, i).length - (stop - start) : to;
    }, place);
  return [moved(start), moved(stop)];
}

function whyPair(page, shown, compared, q, k, textOf) {
  const side = (place, side, documents, tokens) => ({
    slot: place,
    position: side.position(place),
    document: documents,
    token: tokens,
  });
  const ids = page.documents && [shown.arrayOf(page.documents.q).entries[q], shown.arrayOf(page.documents.kv).entries[k]];
  const found = {
    q: side(q, shown.q, ids && ids[0], page.tokens && page.tokens.q[q]),
    k: side(k, shown.kv, ids && ids[1], page.tokens && page.tokens.kv[k]),
    allowed: shown.allowed(q, k),
    tree: whyTree(shown.tree, q, k, textOf),
    other: null,
  };
  if (compared) {
    const text = (start, stop) => page.other.text.slice(start, stop);
    found.other = { allowed: compared.allowed(q, k), tree: whyTree(compared.tree, q, k, text) };
  }
  return found;
}

function checkInt(name, value, least, greatest) {
  if (!Number.isInteger(value) || value < least || value > greatest) {
    const got = typeof value === "string" ? JSON.stringify(value) : String(value);
    throw new RangeError(`${name} must be an integer from ${least} to ${greatest}, got ${got}.`);
  }
}

function checkNumbers(page, values) {
  if (!Array.isArray(values) || values.length !== page.numbers.length) {
    throw new RangeError(`There must be ${page.numbers.length} numbers, one for each number of the expression.`);
  }
  page.numbers.forEach((number, i) => {
    if (number.fixed !== null && values[i] !== number.value) {
      throw new RangeError(`Number ${i} cannot change. ${number.fixed}`);
    }
    checkInt(`Number ${i}`, values[i], Math.min(number.least, number.value), Math.max(number.greatest, number.value));
  });
}
