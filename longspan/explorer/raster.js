// The raster: the mask as square pictures of 256 x 256 pixels at every level of detail. At level (x, y) a pixel is
// 2**x keys by 2**y queries. Pictures are drawn when they become visible, coarse ones first, and kept. Panning only
// copies them.

const SIDE = 256; // pixels along a picture
const MAX_KEPT = 320; // pictures
const TEXTURE = 8; // pixels along the squares that are tested for a regular pattern
const LEAST_TEXTURE = 4; // queries and keys of a pixel from which a pattern is too fine to be seen
const COARSER = 3; // levels: pictures of this much less detail are drawn first

class Raster {
  // `older` is the raster before a change. Its pictures are shown until there are new ones.
  constructor(queries, keys, shader, older) {
    this.older = older;
    if (older) older.older = null;
    this.sizes = [keys, queries];
    this.shader = shader;
    this.deepest = this.sizes.map((size) => Math.max(0, Math.ceil(Math.log2(size / SIDE))));
    this.pictures = new Map();
    this.queue = [];
    this.clock = 0;
  }

  // Queues the pictures that a view needs, those in its middle first.
  want(view, density) {
    this.clock += 1;
    this.level = [view.scaleX, view.scaleY].map((scale, axis) =>
      clamp(Math.floor(Math.log2(1 / (scale * density))), 0, this.deepest[axis])
    );
    this.visible = this.picturesOf(this.level, view);
    const coarse = this.picturesOf(this.coarser(this.level, COARSER), view);
    this.queue = [...coarse, ...this.visible].filter((picture) => !picture.isDone);
    this.forget();
  }

  coarser(level, steps) {
    return level.map((l, axis) => Math.min(l + steps, this.deepest[axis]));
  }

  picturesOf(level, view) {
    const { q0, q1, k0, k1 } = view.visible;
    const [width, height] = level.map((l) => SIDE * 2 ** l);
    const middle = [(k0 + k1) / 2 / width - 0.5, (q0 + q1) / 2 / height - 0.5];
    const found = [];
    for (let row = Math.floor(q0 / height); row * height < q1; row++) {
      for (let column = Math.floor(k0 / width); column * width < k1; column++) {
        const picture = this.pictureAt(level, column, row);
        picture.distance = Math.hypot(column - middle[0], row - middle[1]);
        found.push(picture);
      }
    }
    return found.sort((a, b) => a.distance - b.distance);
  }

  pictureAt(level, column, row) {
    const key = keyOf(level, column, row);
    let picture = this.pictures.get(key);
    if (!picture) this.pictures.set(key, (picture = new Picture(this.sizes, level, column, row)));
    picture.used = this.clock;
    return picture;
  }

  // Draws queued pictures until a time is reached. Returns whether all are done.
  work(deadline) {
    while (this.queue.length) {
      if (!this.queue[0].draw(this.shader, deadline)) return false;
      this.queue.shift();
    }
    this.older = null;
    return true;
  }

  // Drops the pictures that were not used for the longest time.
  forget() {
    if (this.pictures.size <= MAX_KEPT) return;
    const old = [...this.pictures].filter(([, picture]) => picture.used < this.clock);
    old.sort(([, a], [, b]) => a.used - b.used);
    for (const [key] of old.slice(0, this.pictures.size - MAX_KEPT)) this.pictures.delete(key);
  }

  // Copies the visible pictures to a canvas, in its own pixels. Unfinished ones are replaced by coarser ones.
  paint(context, view, density, [x, y]) {
    const edges = (picture) => {
      const { k0, k1, q0, q1 } = picture;
      const left = Math.round((x + view.xOf(k0)) * density);
      const right = Math.round((x + view.xOf(k1)) * density);
      const top = Math.round((y + view.yOf(q0)) * density);
      return [left, top, right - left, Math.round((y + view.yOf(q1)) * density) - top];
    };
    // Large cells have sharp edges; small ones would have uneven sizes.
    context.imageSmoothingEnabled = Math.min(view.scaleX, view.scaleY) * density < 3;
    for (const picture of this.visible) {
      const place = edges(picture);
      this.paintBest(context, picture, place) || this.older?.paintBest(context, picture, place);
    }
  }

  // Paints a picture's part of the mask from it, or from the next coarser one that is done. Returns whether there is one.
  paintBest(context, { level: [wide, high], k0, k1, q0, q1 }, place) {
    let level = [wide, high];
    for (;;) {
      const found = this.pictures.get(keyOf(level, ...placeAt(level, k0, q0)));
      if (found?.isDone) {
        const from = [(k0 - found.k0) / found.wide, (q0 - found.q0) / found.high];
        found.paint(context, place, [...from, (k1 - k0) / found.wide, (q1 - q0) / found.high]);
        return true;
      }
      if (level[0] === this.deepest[0] && level[1] === this.deepest[1]) return false;
      level = this.coarser(level, 1);
    }
  }
}

const keyOf = (level, column, row) => `${level} ${column} ${row}`;

// The column and row of the picture that contains a key and a query.
const placeAt = ([x, y], key, query) => [Math.floor(key / (SIDE * 2 ** x)), Math.floor(query / (SIDE * 2 ** y))];

// A part of the mask: keys [k0, k1) and queries [q0, q1).
class Picture {
  constructor([keys, queries], level, column, row) {
    this.level = level;
    [this.wide, this.high] = [2 ** level[0], 2 ** level[1]];
    [this.k0, this.q0] = [column * SIDE * this.wide, row * SIDE * this.high];
    [this.k1, this.q1] = [Math.min(this.k0 + SIDE * this.wide, keys), Math.min(this.q0 + SIDE * this.high, queries)];
    this.width = Math.max(Math.ceil((this.k1 - this.k0) / this.wide), 0);
    this.height = Math.max(Math.ceil((this.q1 - this.q0) / this.high), 0);
    this.isCoarse = Math.min(this.wide, this.high) >= LEAST_TEXTURE;
    this.todo = [0, 0, SIDE]; // squares of pixels: left, top, side
    this.pixels = null;
    this.canvas = null;
    this.colour = 0;
    this.isDone = this.width === 0 || this.height === 0;
  }

  // Draws by quarters: a square is filled if all of its pairs have one colour, else divided. Returns whether it is done.
  draw(shader, deadline) {
    if (this.isDone) return true;
    this.pixels ??= new Uint32Array(this.width * this.height);
    const { todo } = this;
    for (let count = 1; todo.length; count++) {
      if (count % 32 === 0 && performance.now() > deadline) return false;
      const side = todo.pop();
      const top = todo.pop();
      this.square(shader, todo.pop(), top, side);
    }
    this.finish();
    return true;
  }

  square(shader, left, top, side) {
    if (left >= this.width || top >= this.height) return;
    const [right, bottom] = [Math.min(left + side, this.width), Math.min(top + side, this.height)];
    const q0 = this.q0 + top * this.high;
    const q1 = Math.min(this.q0 + bottom * this.high, this.q1);
    const k0 = this.k0 + left * this.wide;
    const k1 = Math.min(this.k0 + right * this.wide, this.k1);
    const isWhole = right - left === side && bottom - top === side;
    let colour = shader.uniform(q0, q1, k0, k1);
    if (colour === null && side === TEXTURE && isWhole && this.isCoarse) colour = shader.texture(q0, q1, k0, k1);
    if (colour === null && side === 1) colour = shader.mixed(q0, q1, k0, k1);
    if (colour === null) {
      const half = side / 2;
      for (const y of [top + half, top]) this.todo.push(left + half, y, half, left, y, half);
    } else if (colour !== 0) {
      for (let y = top; y < bottom; y++) this.pixels.fill(colour, y * this.width + left, y * this.width + right);
    }
  }

  finish() {
    this.isDone = true;
    this.colour = this.pixels[0];
    if (!this.pixels.every((pixel) => pixel === this.colour)) {
      this.canvas = element("canvas", { width: this.width, height: this.height });
      const image = new ImageData(new Uint8ClampedArray(this.pixels.buffer), this.width, this.height);
      this.canvas.getContext("2d").putImageData(image, 0, 0);
    }
    this.pixels = null;
  }

  paint(context, [x, y, width, height], [left, top, wide, high]) {
    if (this.canvas) {
      context.drawImage(this.canvas, left, top, wide, high, x, y, width, height);
    } else if (this.colour) {
      const [red, green, blue] = [0, 8, 16].map((shift) => (this.colour >>> shift) & 255);
      context.fillStyle = `rgba(${red},${green},${blue},${(this.colour >>> 24) / 255})`;
      context.fillRect(x, y, width, height);
    }
  }
}
