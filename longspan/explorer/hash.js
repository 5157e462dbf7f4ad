// The state of the page, and the address's hash that stores it: `#q=5&k=3&zoom=1&tile=128,128&t=100&devices=8` and so on.

const PANELS = ["cell", "tiles", "cache", "devices", "diff"];
const ORDERS = ["contiguous", "zigzag"];
const DEVICE_COUNTS = [2, 4, 8, 16];
const MOST_TILE = FAR;

function defaultState(page) {
  return {
    q: null,
    k: null,
    zoom: 1,
    tile: [128, 128],
    t: Math.max(stepsOf(page) - 1, 0),
    devices: 8,
    order: "contiguous",
    panel: "cell",
    numbers: page.numbers.map((number) => number.value),
  };
}

const stepsOf = (page) => page.cache.length ?? page.kv_len;

// The state that a hash describes. Raises a RangeError if any part of the hash is not valid.
function stateOfHash(page, hash) {
  const changes = new Map();
  for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (changes.has(name)) throw new RangeError(`${name} must be given once.`);
    changes.set(name, value);
  }
  return changedState(page, defaultState(page), Object.fromEntries(changes));
}

// A state with changes. Their names and values are those of the hash; values may also be numbers and lists.
function changedState(page, state, changes) {
  const found = { ...state, numbers: [...state.numbers] };
  for (const [name, value] of Object.entries(changes)) {
    if (name === "set" && isObject(value)) Object.entries(value).forEach(([i, number]) => setNumber(page, found, i, number));
    else if (name.startsWith("set.")) setNumber(page, found, name.slice(4), value);
    else if (Object.hasOwn(READ, name)) found[name] = READ[name](value, page);
    else throw new RangeError(`"${name}" is not one of ${Object.keys(READ).join(", ")}, set.0, set.1, and so on.`);
  }
  if ((found.q === null) !== (found.k === null)) throw new RangeError("q and k must be given together.");
  return found;
}

const isObject = (value) => typeof value === "object" && value !== null;
const valueText = (value) => (String(value) === "" ? "nothing" : String(value));

const READ = {
  q: (value, page) => slotOf("q", value, page.q_len),
  k: (value, page) => slotOf("k", value, page.kv_len),
  zoom(value) {
    const isNumber = typeof value === "number" || /^\d+(\.\d+)?$/.test(String(value).trim());
    const zoom = Number(value);
    if (!isNumber || !Number.isFinite(zoom) || zoom < 1) {
      throw new RangeError(`zoom must be a number from 1, got ${valueText(value)}.`);
    }
    return zoom;
  },
  tile(value) {
    const sizes = Array.isArray(value) ? value : String(value).split(",");
    if (sizes.length !== 2) throw new RangeError(`tile must be two numbers, as in 128,128, got ${valueText(value)}.`);
    return sizes.map((size) => integer("tile", size, 1, MOST_TILE));
  },
  t: (value, page) => integer("t", value, 0, Math.max(stepsOf(page) - 1, 0)),
  devices: (value) => Number(oneOf("devices", String(value).trim(), DEVICE_COUNTS.map(String))),
  order: (value) => oneOf("order", value, ORDERS),
  panel: (value) => oneOf("panel", value, PANELS),
};

function slotOf(name, value, length) {
  if (value === null) return null;
  if (!length) throw new RangeError(`${name} must be left out: the mask has no pairs.`);
  return integer(name, value, 0, length - 1);
}

function integer(name, value, least, greatest) {
  const text = String(value).trim();
  const number = Number(text);
  if (!/^-?\d+$/.test(text) || number < least || number > greatest) {
    throw new RangeError(`${name} must be an integer from ${least} to ${greatest}, got ${valueText(value)}.`);
  }
  return number;
}

function oneOf(name, value, choices) {
  if (!choices.includes(value)) throw new RangeError(`${name} must be one of ${choices.join(", ")}, got ${valueText(value)}.`);
  return value;
}

function setNumber(page, state, index, value) {
  const place = integer("The index after set.", index, 0, page.numbers.length - 1);
  const { least, greatest, value: initial, fixed } = page.numbers[place];
  const number = integer(`set.${place}`, value, Math.min(least, initial), Math.max(greatest, initial));
  if (fixed !== null && number !== initial) throw new RangeError(`set.${place} cannot change. ${fixed}`);
  state.numbers[place] = number;
}

// The hash of a state: only what differs from the defaults.
function hashOf(page, state) {
  const defaults = defaultState(page);
  const parts = [];
  for (const name of Object.keys(READ)) {
    if (String(state[name]) !== String(defaults[name])) parts.push(`${name}=${formatted(name, state[name])}`);
  }
  state.numbers.forEach((number, i) => {
    if (number !== defaults.numbers[i]) parts.push(`set.${i}=${number}`);
  });
  return parts.length ? `#${parts.join("&")}` : "";
}

const formatted = (name, value) => (name === "zoom" ? Number(value.toPrecision(4)) : value);
