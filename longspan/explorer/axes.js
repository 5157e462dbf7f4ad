// Axes: the numbers of tokens, their texts where cells are large enough, and bands for documents.

const FONT = '11px system-ui, -apple-system, "Segoe UI", sans-serif';
const BAND = 6; // pixels across a band of documents
const TEXT_CELL = 15; // pixels along a cell from which tokens' texts are shown
const MAX_TEXT = 10; // characters of a token's text
const DOCUMENT_COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#9c755f", "#e377c2"];

// The runs of equal ids of one side: [[start, stop, id], ...]; padding has a negative id.
function documentRuns(ids) {
  const runs = [];
  let start = 0;
  for (let at = 1; at <= ids.length; at++) {
    if (at < ids.length && ids[at] === ids[start]) continue;
    runs.push([start, at, ids[start]]);
    start = at;
  }
  return runs;
}

// The step between numbers: 1, 2, 5, 10, 20, ..., at least `gap` pixels apart. Cells of powers of two look tidier in
// powers of two.
function tickStep(scale, gap, length) {
  const isPower = length > 1 && Number.isInteger(Math.log2(length));
  const least = gap / scale;
  if (isPower) return 2 ** Math.max(0, Math.ceil(Math.log2(least)));
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= least) ?? 10 * power;
}

class Axes {
  constructor(page) {
    this.page = page;
    this.runs = null;
    if (page.documents) {
      const of = (index) => documentRuns(decodeArray(page.arrays[index]));
      this.runs = { q: of(page.documents.q), kv: of(page.documents.kv) };
    }
    const digits = (length) => grouped(Math.max(length - 1, 0)).length * 6.4;
    const band = this.runs ? BAND + 4 : 0;
    const text = page.tokens ? 62 : 0;
    this.left = Math.ceil(Math.max(digits(page.q_len), text)) + 10 + band;
    this.top = (page.tokens ? 62 : 24) + band;
    this.right = page.tokens ? 30 : 2;
    this.ends = band;
  }

  draw(context, view, ink) {
    context.font = FONT;
    context.fillStyle = ink.muted;
    context.strokeStyle = ink.line;
    context.lineWidth = 1;
    this.drawKeys(context, view);
    this.drawQueries(context, view);
    if (this.runs) this.drawBands(context, view);
  }

  drawKeys(context, view) {
    const { tokens } = this.page;
    const { k0, k1 } = view.visible;
    const hasText = tokens && view.scaleX >= TEXT_CELL;
    const bottom = this.top - this.ends - 7;
    context.textBaseline = "middle";
    if (hasText) {
      context.textAlign = "left";
      for (let k = k0; k < k1; k++) {
        const x = this.left + view.xOf(k + 0.5);
        if (x < this.left || x > this.left + view.width) continue;
        context.save();
        context.translate(x, bottom);
        context.rotate(-Math.PI / 3);
        context.fillText(shownText(tokens.kv[k]), 0, 0);
        context.restore();
      }
      return;
    }
    context.textAlign = "center";
    const widest = grouped(this.page.kv_len).length * 6.4 + 18;
    const step = tickStep(view.scaleX, widest, this.page.kv_len);
    for (let k = Math.ceil(k0 / step) * step; k < Math.min(k1, this.page.kv_len); k += step) {
      const x = this.left + view.xOf(k) + Math.min(view.scaleX, 200) / 2;
      const half = grouped(k).length * 3.2;
      if (x < this.left - 2 || x + half > this.left + view.width + this.right) continue;
      context.fillText(grouped(k), x, bottom - 3);
      this.mark(context, x, this.top - this.ends - 4, 0, 3);
    }
  }

  drawQueries(context, view) {
    const { tokens } = this.page;
    const { q0, q1 } = view.visible;
    const hasText = tokens && view.scaleY >= TEXT_CELL;
    const step = hasText ? 1 : tickStep(view.scaleY, 26, this.page.q_len);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let q = Math.ceil(q0 / step) * step; q < Math.min(q1, this.page.q_len); q += step) {
      const y = this.top + view.yOf(q) + Math.min(view.scaleY, 200) / 2;
      if (y < this.top - 2 || y > this.top + view.height - 2) continue;
      context.fillText(hasText ? shownText(tokens.q[q]) : grouped(q), this.left - this.ends - 8, y);
      if (!hasText) this.mark(context, this.left - this.ends - 5, y, 3, 0);
    }
  }

  mark(context, x, y, dx, dy) {
    context.beginPath();
    this.line(context, x, y, dx, dy);
    context.stroke();
  }

  line(context, x, y, dx, dy) {
    context.moveTo(x, y);
    context.lineTo(x + dx, y + dy);
  }

  drawBands(context, view) {
    const { q0, q1, k0, k1 } = view.visible;
    const top = this.top - BAND - 3;
    const left = this.left - BAND - 3;
    for (const [start, stop, id] of visibleRuns(this.runs.kv, k0, k1, 1 / view.scaleX)) {
      const [x0, x1] = [Math.max(view.xOf(start), 0), Math.min(view.xOf(stop), view.width)];
      context.fillStyle = documentColour(id);
      context.fillRect(this.left + x0, top, x1 - x0, BAND);
    }
    for (const [start, stop, id] of visibleRuns(this.runs.q, q0, q1, 1 / view.scaleY)) {
      const [y0, y1] = [Math.max(view.yOf(start), 0), Math.min(view.yOf(stop), view.height)];
      context.fillStyle = documentColour(id);
      context.fillRect(left, this.top + y0, BAND, y1 - y0);
    }
  }

  // Lines between documents, where these are long enough to see.
  drawEdges(context, view, ink) {
    if (!this.runs) return;
    context.strokeStyle = ink.line;
    context.lineWidth = 1;
    context.beginPath();
    const { q0, q1, k0, k1 } = view.visible;
    for (const [start] of visibleRuns(this.runs.kv, k0, k1, 24 / view.scaleX)) {
      const x = Math.round(this.left + view.xOf(start)) + 0.5;
      if (start > k0) this.line(context, x, this.top, 0, view.height);
    }
    for (const [start] of visibleRuns(this.runs.q, q0, q1, 24 / view.scaleY)) {
      const y = Math.round(this.top + view.yOf(start)) + 0.5;
      if (start > q0) this.line(context, this.left, y, view.width, 0);
    }
    context.stroke();
  }
}

// The runs of [start, stop) that are at least `least` slots long. Padding has none.
function* visibleRuns(runs, start, stop, least) {
  let low = 0;
  let high = runs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (runs[middle][1] <= start) low = middle + 1;
    else high = middle;
  }
  for (let i = low; i < runs.length && runs[i][0] < stop; i++) {
    if (runs[i][2] >= 0 && runs[i][1] - runs[i][0] >= least) yield runs[i];
  }
}

const documentColour = (id) => DOCUMENT_COLOURS[id % DOCUMENT_COLOURS.length];

// A token as an axis shows it: white space is visible, and long texts are cut.
function shownText(token) {
  const visible = token.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/ /g, "\u2423");
  const characters = [...visible];
  return characters.length > MAX_TEXT ? `${characters.slice(0, MAX_TEXT - 1).join("")}\u2026` : visible;
}
