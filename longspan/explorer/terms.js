// Sides and terms: a number for each token of a side, as `masks/sides.py` and `masks/terms.py` define them.

// One side of the attention matrix: its length, and the position of each slot.
class Side {
  constructor(length, positions) {
    this.length = length;
    this.positions = positions;
    this.ranges = positions && new Ranges(positions);
    this.grows = !positions || positions.every((p, i) => i === 0 || positions[i - 1] <= p);
  }

  position(slot) {
    return this.positions ? this.positions[slot] : slot;
  }

  first(start, stop) {
    return this.positions ? this.ranges.least(start, stop) : start;
  }

  last(start, stop) {
    return this.positions ? this.ranges.greatest(start, stop) : stop - 1;
  }

  // A half-open interval of slots that contains every slot whose position is in [low, high].
  between(low, high) {
    if (!this.positions) return slotsBetween(this.length, low, high);
    if (!this.grows) return [0, this.length];
    return [bisect(this.positions, low), bisect(this.positions, high, "right")];
  }
}

function slotsBetween(length, low, high) {
  return [clamp(low, 0, length), clamp(high, -1, length - 1) + 1];
}

const VALID = { all: null, ">=0": (entry) => entry >= 0, "!=0": (entry) => entry !== 0 };

// A number for each token of a side: source // divide % modulo + plus.
class Term {
  constructor(term, side, values, arrayOf) {
    this.of = term.of;
    this.side = side;
    this.byHead = term.by_head;
    this.divide = readNumber(values, term.divide);
    this.modulo = term.modulo === null ? null : readNumber(values, term.modulo);
    this.plus = readNumber(values, term.plus);
    this.divisor = Math.max(this.divide.value, 1);
    this.divides = !isStatic(this.divide, 1);
    this.shift = this.plus.value;
    this.round = this.modulo && Math.max(this.modulo.value, 1);
    this.clips = this.of === "array" && !isStatic(this.plus, 0); // as Python: only if something is added
    this.valid = VALID[term.valid];
    this.validName = term.valid;
    this.grows = (this.of === "position" || this.of === "slot") && this.modulo === null;
    this.low = this.high = 0; // what `range` finds
    this.total = true;
    this.seenStart = this.seenStop = -1;
    if (this.of === "array") this.readArray(term.data, arrayOf);
    if (this.of === "number") {
      this.number = readNumber(values, term.data);
      this.constant = this.formed(this.number.value);
    }
    if (this.of === "member") {
      const listed = term.data.map((entry) => readNumber(values, entry).value);
      this.members = [...new Set(listed)].sort((a, b) => a - b);
      this.isMember = new Set(this.members);
    }
  }

  readArray(index, arrayOf) {
    this.index = index;
    this.entries = arrayOf(index).entries;
    this.ranges = () => arrayOf(index).validRanges(this.validName);
    this.isStaticArray = this.divide.isStatic && (this.modulo === null || this.modulo.isStatic) && this.plus.isStatic;
  }

  formed(value) {
    if (this.divides) value = floorDivide(value, this.divisor);
    if (this.round !== null) value = floorModulo(value, this.round);
    if (this.clips) value = clamp(value, -FAR, FAR);
    return value + this.shift;
  }

  // The term of a slot. Whether the slot's entry is valid is `defined`.
  value(slot) {
    if (this.of === "position") return this.formed(this.side.position(slot));
    if (this.of === "slot") return this.formed(slot);
    if (this.of === "number") return this.constant;
    if (this.of === "array") return this.formed(this.entries[slot]);
    return this.formed(Number(this.isMember.has(this.side.position(slot))));
  }

  defined(slot) {
    return this.valid === null || this.valid(this.entries[slot]);
  }

  // Sets `low`, `high` and `total` to the least and greatest number of a run of slots, and whether all are valid. If none
  // is valid, low > high.
  range(start, stop) {
    if (start === this.seenStart && stop === this.seenStop) return;
    this.seenStart = start;
    this.seenStop = stop;
    this.sourceRange(start, stop);
    if (this.round === null) {
      this.low = this.formed(this.low);
      this.high = this.formed(this.high);
      return;
    }
    const low = floorDivide(this.low, this.divisor);
    const high = floorDivide(this.high, this.divisor);
    const oneRound = floorDivide(low, this.round) === floorDivide(high, this.round);
    this.low = (oneRound ? floorModulo(low, this.round) : 0) + this.shift;
    this.high = (oneRound ? floorModulo(high, this.round) : this.round - 1) + this.shift;
  }

  sourceRange(start, stop) {
    this.total = true;
    if (this.of === "position") {
      this.low = this.side.first(start, stop);
      this.high = this.side.last(start, stop);
    } else if (this.of === "slot") {
      this.low = start;
      this.high = stop - 1;
    } else if (this.of === "number") {
      this.low = this.high = this.number.value;
    } else if (this.of === "member") {
      const first = this.side.first(start, stop);
      const last = this.side.last(start, stop);
      const inside = bisect(this.members, last, "right") - bisect(this.members, first);
      this.low = Number(inside === last - first + 1);
      this.high = Number(inside > 0);
    } else {
      const { ranges, invalid } = this.ranges();
      this.low = ranges.least(start, stop);
      this.high = ranges.greatest(start, stop);
      this.total = invalid === null || invalid[stop] === invalid[start];
    }
  }

  // The range of the source for which the term, which grows, is in [low, high].
  inverse(low, high) {
    return [(low - this.shift) * this.divisor, (high - this.shift + 1) * this.divisor - 1];
  }
}

// An array of the document with its ranges, computed when they are first needed.
class Entries {
  constructor(entry) {
    this.shape = entry.shape;
    this.entries = decodeArray(entry);
    this.known = {};
  }

  // {ranges: of the valid entries, invalid: the number of invalid entries before each slot, or null}
  validRanges(name) {
    if (!this.known[name]) {
      const valid = VALID[name];
      if (valid === null) {
        this.known[name] = { ranges: new Ranges(this.entries), invalid: null };
      } else {
        const size = this.entries.length;
        const ranges = new Ranges(this.entries);
        const invalid = new Int32Array(size + 1);
        for (let i = 0; i < size; i++) {
          const isValid = valid(this.entries[i]);
          invalid[i + 1] = invalid[i] + Number(!isValid);
          ranges.low[size + i] = isValid ? this.entries[i] : MOST;
          ranges.high[size + i] = isValid ? this.entries[i] : LEAST;
        }
        ranges.build();
        this.known[name] = { ranges, invalid };
      }
    }
    return this.known[name];
  }
}
