// The tiles panel: the tiles that engines visit, and what one call costs.

const TOO_MANY = `The picture shows tiles if there are at most ${grouped(MOST_TILE_ROWS)} rows of them.`;

class TilesPanel {
  constructor(app) {
    this.app = app;
    this.sides = [["q-tile", 0], ["kv-tile", 1]];
    for (const [id, side] of this.sides) {
      byId(id).addEventListener("input", () => this.change(side, 2 ** byId(id).valueAsNumber));
      byId(`${id}-number`).addEventListener("change", () => this.change(side, byId(`${id}-number`).valueAsNumber));
    }
  }

  change(side, size) {
    if (!Number.isInteger(size) || size < 1 || size > MOST_TILE) {
      this.app.refresh();
      return;
    }
    const tile = [...this.app.state.tile];
    tile[side] = size;
    this.app.change({ tile });
  }

  show({ tile }) {
    for (const [id, side] of this.sides) {
      byId(id).value = Math.round(Math.log2(tile[side]));
      byId(id).setAttribute("aria-valuetext", counted(tile[side], "token"));
      if (document.activeElement !== byId(`${id}-number`)) byId(`${id}-number`).value = tile[side];
    }
    const { page, background, map } = this.app;
    const tiles = background.answer("tiles", ...tile);
    const pairs = background.answer("count");
    byId("tiles-pending").hidden = tiles !== undefined;
    byId("tiles-zoom").hidden = areTilesDrawn(page, map.view, tile);
    byId("tiles-zoom").textContent = page.q_len / tile[0] > MOST_TILE_ROWS ? TOO_MANY : "Zoom in to see the tiles.";
    if (!tiles) return { q_tile: tile[0], kv_tile: tile[1], pending: true };
    byId("tiles-bar").replaceChildren(...tileBar(tiles));
    fillTable(byId("tiles-facts"), tileFacts(page, tiles, pairs));
    return { ...tiles, ...costsOf(page, tiles, pairs ?? null), pending: pairs === undefined };
  }
}

function tileBar({ total, full, partial }) {
  return [["full", full], ["partial", partial], ["empty", total - full - partial]].map(([kind, count]) =>
    element("span", { class: kind, style: `flex-grow: ${total ? count / total : 0}` })
  );
}

function tileFacts(page, tiles, pairs) {
  const share = (count) => `${grouped(count)} (${percent(count, tiles.total)})`;
  const costs = costsOf(page, tiles, pairs ?? null);
  const pending = pairs === undefined ? "counting \u2026" : "not known";
  const all = page.q_len * page.kv_len;
  const useful = costs.useful_flops;
  return [
    ["tiles", grouped(tiles.total)],
    [kindName("full", "full"), share(tiles.full)],
    [kindName("partial", "partial"), share(tiles.partial)],
    [kindName("empty", "empty"), share(tiles.empty)],
    ["allowed pairs", costs.pairs === null ? pending : `${grouped(costs.pairs)} (${percent(costs.pairs, all)})`],
    ["useful FLOPs", useful === null ? pending : short(useful, "FLOP", 1000)],
    ["executed FLOPs", short(costs.executed_flops, "FLOP", 1000)],
    ["useful share", useful === null ? pending : percent(useful, costs.executed_flops)],
    ["inputs and outputs", short(costs.array_bytes, "B", 1024)],
    ["dense mask (not allocated)", short(costs.dense_mask_bytes, "B", 1024)],
  ];
}

const kindName = (kind, name) => element("span", { class: "kind" }, element("i", { class: `swatch ${kind}` }), name);
