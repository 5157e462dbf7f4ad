// Overlays: what panels draw over the picture of the mask.

const LEAST_TILE = 6; // pixels along a tile from which the tiles are drawn
const MOST_TILE_ROWS = 2 ** 17;
const LEAST_MARK = 16; // pixels along a cell that has a question mark
const LEAST_LABEL = 14; // pixels along a device's rows from which they are named

function areTilesDrawn(page, view, [qTile, kvTile]) {
  const isLarge = Math.min(kvTile * view.scaleX, qTile * view.scaleY) >= LEAST_TILE;
  return isLarge && page.q_len / qTile <= MOST_TILE_ROWS;
}

// The grid of tiles, with a wash over the PARTIAL ones. `kindOf` returns the kind of the tile of a row and a column.
function drawTiles(context, view, kindOf, [qTile, kvTile], [left, top], ink) {
  const { q0, q1, k0, k1 } = view.visible;
  context.fillStyle = ink.partialWash;
  for (let row = Math.floor(q0 / qTile); row * qTile < q1; row++) {
    for (let column = Math.floor(k0 / kvTile); column * kvTile < k1; column++) {
      if (kindOf(row, column) !== ANY) continue;
      const [x, y] = [view.xOf(column * kvTile), view.yOf(row * qTile)];
      const right = view.xOf(Math.min((column + 1) * kvTile, view.keys));
      const bottom = view.yOf(Math.min((row + 1) * qTile, view.queries));
      context.fillRect(left + x, top + y, right - x, bottom - y);
    }
  }
  context.strokeStyle = ink.line;
  context.lineWidth = 1;
  context.beginPath();
  gridLines(context, view, [left, top], kvTile, qTile);
  context.stroke();
}

// Lines between cells of `wide` keys and `high` queries.
function gridLines(context, view, [left, top], wide, high) {
  const { q0, q1, k0, k1 } = view.visible;
  const bottom = top + Math.min(view.yOf(view.queries), view.height);
  const right = left + Math.min(view.xOf(view.keys), view.width);
  for (let k = Math.ceil(k0 / wide) * wide; k <= k1; k += wide) {
    const x = Math.round(left + view.xOf(k)) + 0.5;
    context.moveTo(x, top);
    context.lineTo(x, bottom);
  }
  for (let q = Math.ceil(q0 / high) * high; q <= q1; q += high) {
    const y = Math.round(top + view.yOf(q)) + 0.5;
    context.moveTo(left, y);
    context.lineTo(right, y);
  }
}

// Question marks in the cells that the page does not know, where they are large enough.
function drawUnknown(context, view, explorer, [left, top], ink) {
  if (Math.min(view.scaleX, view.scaleY) < LEAST_MARK) return;
  const { q0, q1, k0, k1 } = view.visible;
  context.font = FONT;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillStyle = ink.text;
  for (let q = q0; q < q1; q++) {
    for (let k = k0; k < k1; k++) {
      if (explorer.allowed(q, k) === null) context.fillText("?", left + view.xOf(k + 0.5), top + view.yOf(q + 0.5));
    }
  }
}

// The step of a cache: a line at its query, thick over the kept keys.
function drawStep(context, view, found, [left, top], ink) {
  if (found.error) return;
  const height = Math.max(4, Math.min(view.scaleY, 12));
  const y = top + view.yOf(found.step + 0.5) - height / 2;
  if (y < top - height || y > top + view.height) return;
  const bar = ([start, stop], colour) => {
    const [x0, x1] = [Math.max(view.xOf(start), 0), Math.min(view.xOf(stop), view.width)];
    if (x1 <= x0) return;
    context.fillStyle = colour;
    context.fillRect(left + x0, y, Math.max(x1 - x0, 1.5), height);
  };
  context.fillStyle = ink.paper; // an edge that separates the step from the picture
  context.fillRect(left, y - 1, Math.min(view.xOf(found.step + 1), view.width), height + 2);
  bar([0, found.step + 1], ink.evicted);
  for (const span of found.kept) bar(span, ink.kept);
  for (const key of found.pinned) bar([key, key + 1], ink.pinned);
}

// The rows of queries that each device holds; of one device also the keys that it receives, as columns.
function drawDevices(context, view, plan, device, [left, top], ink) {
  if (plan.error) return;
  if (device !== null) drawDevice(context, view, plan.devices[device], [left, top], ink);
  context.font = FONT;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const right = left + Math.min(view.xOf(view.keys), view.width);
  for (const { device: name, holds } of plan.devices) {
    for (const [start, stop] of holds) {
      const [y0, y1] = [Math.max(view.yOf(start), 0), Math.min(view.yOf(stop), view.height)];
      if (y1 <= y0) continue;
      context.fillStyle = ink.line;
      context.fillRect(left, top + Math.round(y1), right - left, 1);
      if (y1 - y0 >= LEAST_LABEL) outlinedText(context, `device ${name}`, right - 6, top + (y0 + y1) / 2, ink);
    }
  }
}

// Text that is readable on every colour.
function outlinedText(context, text, x, y, ink) {
  context.lineJoin = "round";
  context.lineWidth = 4;
  context.strokeStyle = ink.paper;
  context.strokeText(text, x, y);
  context.fillStyle = ink.text;
  context.fillText(text, x, y);
}

function drawDevice(context, view, { holds, receives }, [left, top], ink) {
  const bands = holds.map(([start, stop]) => [Math.max(view.yOf(start), 0), Math.min(view.yOf(stop), view.height)]);
  for (const [y0, y1] of bands) {
    context.fillStyle = ink.heldWash;
    if (y1 > y0) context.fillRect(left, top + y0, Math.min(view.xOf(view.keys), view.width), y1 - y0);
    context.fillStyle = ink.receivedWash;
    for (const [kind, start, stop] of receives) {
      const [x0, x1] = [Math.max(view.xOf(start), 0), Math.min(view.xOf(stop), view.width)];
      if (kind !== "queries" && x1 > x0 && y1 > y0) context.fillRect(left + x0, top + y0, Math.max(x1 - x0, 1.5), y1 - y0);
    }
  }
}

// The selected cell, with lines along its query and its key.
function drawCell(context, view, { q, k }, [left, top], ink, isSelected) {
  const [x, y] = [left + view.xOf(k), top + view.yOf(q)];
  const [width, height] = [Math.max(view.scaleX, 1), Math.max(view.scaleY, 1)];
  context.fillStyle = ink.guide;
  context.fillRect(left, y, Math.min(view.xOf(view.keys), view.width), height);
  context.fillRect(x, top, width, Math.min(view.yOf(view.queries), view.height));
  const grown = Math.max(0, 7 - Math.min(width, height)) / 2;
  context.lineWidth = isSelected ? 3.5 : 2.5;
  context.strokeStyle = ink.paper;
  context.strokeRect(x - grown, y - grown, width + 2 * grown, height + 2 * grown);
  context.lineWidth = isSelected ? 2 : 1;
  context.strokeStyle = ink.text;
  context.strokeRect(x - grown, y - grown, width + 2 * grown, height + 2 * grown);
}
