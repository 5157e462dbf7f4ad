// The page: its state, and what happens when it changes.

class App {
  constructor(page) {
    this.page = page;
    this.explorer = makeExplorer(page);
    this.state = defaultState(page);
    this.hover = null;
    this.hasCells = hasCells(page.mask.program) || (page.other !== null && hasCells(page.other.program));
    this.background = new Background(page, this.explorer, this.hasCells, () => this.showPanel());
    this.panels = {
      cell: new CellPanel(this), tiles: new TilesPanel(this), cache: new CachePanel(this),
      devices: new DevicesPanel(this), diff: new DiffPanel(this),
    };
    this.editor = new ExpressionEditor(page, this.explorer, (numbers) => this.change({ set: numbers }));
    this.map = new MaskMap(page, this.explorer, {
      overlay: (...drawing) => this.overlay(...drawing),
      onSettled: () => this.settled(),
    });
    listenToGestures(this.map, {
      select: (cell) => this.selectCell(cell),
      hover: (cell) => this.hoverCell(cell),
      move: (dq, dk) => this.moveCell(dq, dk),
    });
    this.listenToControls();
    document.body.classList.toggle("has-cells", this.hasCells);
    this.readHash();
    addEventListener("hashchange", () => this.readHash());
  }

  listenToControls() {
    const { map } = this;
    byId("zoom-in").addEventListener("click", () => map.zoomBy(2));
    byId("zoom-out").addEventListener("click", () => map.zoomBy(0.5));
    byId("zoom-all").addEventListener("click", () => map.zoomTo(1));
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.selectCell(null);
    });
    const tabs = PANELS.map((name) => byId(`tab-${name}`));
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => this.change({ panel: PANELS[i] }));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const next = (i + step + PANELS.length) % PANELS.length;
        this.change({ panel: PANELS[next] });
        tabs[next].focus();
      });
    });
  }

  // Takes changes with the names of the hash, and shows them.
  change(changes) {
    this.apply(changedState(this.page, this.state, changes), changes);
  }

  apply(state, changes) {
    const before = this.state;
    this.state = state;
    this.explorer.setNumbers(state.numbers);
    if (String(before.numbers) !== String(state.numbers)) this.map.reset();
    if ("zoom" in changes) this.map.zoomTo(state.zoom);
    const cell = state.q === null ? null : { q: state.q, k: state.k };
    if (cell && "zoom" in changes) this.map.view.centre(cell.q, cell.k);
    this.map.select(cell, "q" in changes || "k" in changes);
    this.refresh();
  }

  // Shows the state again.
  refresh() {
    const { state, page } = this;
    byId("problem").hidden = true;
    this.editor.show();
    for (const name of PANELS) {
      const isShown = name === state.panel;
      byId(`panel-${name}`).hidden = !isShown;
      byId(`tab-${name}`).setAttribute("aria-selected", String(isShown));
      byId(`tab-${name}`).tabIndex = isShown ? 0 : -1;
    }
    this.map.setMode(state.panel === "diff" && page.other ? "difference" : "mask");
    this.map.hasEdges = state.panel !== "tiles"; // they look like the grid of tiles
    this.showPanel();
    byId("legend").dataset.panel = this.legend;
    this.map.redraw();
  }

  // The panel whose colours the legend explains.
  get legend() {
    const { panel } = this.state;
    if (panel === "diff" && !this.page.other) return "cell";
    if (["cache", "devices"].includes(panel) && !this.explorer.isInitial) return "cell";
    return panel === "devices" && this.panels.devices.device === null ? "cell" : panel;
  }

  showPanel() {
    this.background.begin();
    const shown = this.panels[this.state.panel].show(this.state);
    this.background.proceed();
    this.showReadout();
    this.mirror(shown);
  }

  // The script `state` has what the page shows, as JSON.
  mirror(shown) {
    const { numbers, ...state } = this.state;
    const set = Object.fromEntries(numbers.map((number, i) => [`set.${i}`, number]));
    const zoom = Number(this.map.view.zoom.toPrecision(4));
    this.shown = { ...state, zoom, ...set, expression: this.explorer.text, shown };
    byId("state").textContent = JSON.stringify(this.shown).replace(/</g, "\\u003c");
  }

  showReadout() {
    const cell = this.hover ?? this.map.cell;
    const { view } = this.map;
    const scale = Math.min(view.scaleX, view.scaleY);
    byId("readout").textContent = cell ? this.answer(cell) : scaleText(scale);
  }

  // Whether the masks of the panel allow a cell, in words.
  answer({ q, k }) {
    const truth = this.explorer.allowed(q, k);
    if (this.map.mode === "mask") return answerText({ q, k }, truth);
    return comparedText({ q, k }, truth, this.explorer.allowedByOther(q, k));
  }

  selectCell(cell, { leastCell = 0 } = {}) {
    const { view } = this.map;
    if (cell && Math.min(view.scaleX, view.scaleY) < leastCell) {
      this.map.zoomTo((view.zoom * leastCell) / Math.min(view.scaleX, view.scaleY));
      view.centre(cell.q, cell.k);
    }
    this.change(cell ?? { q: null, k: null });
    const spoken = cell ? spokenAnswer(cell, this.explorer.why(cell.q, cell.k)) : "No cell is selected.";
    byId("announcement").textContent = spoken;
  }

  moveCell(dq, dk) {
    const { q_len: queries, kv_len: keys } = this.page;
    if (!queries || !keys) return;
    const { q0, q1, k0, k1 } = this.map.view.visible;
    const from = this.map.cell ?? { q: (q0 + q1) >> 1, k: (k0 + k1) >> 1 };
    const moved = this.map.cell ? [from.q + dq, from.k + dk] : [from.q, from.k];
    this.selectCell({ q: clamp(moved[0], 0, queries - 1), k: clamp(moved[1], 0, keys - 1) });
  }

  hoverCell(cell) {
    if (cell?.q === this.hover?.q && cell?.k === this.hover?.k) return;
    this.hover = cell;
    this.map.hover = cell;
    if (this.state.panel === "cell") this.showPanel();
    else this.showReadout();
    this.map.redraw();
  }

  overlay(context, view, origin, ink) {
    const { state, explorer, page } = this;
    if (this.hasCells) drawUnknown(context, view, explorer, origin, ink);
    if (state.panel === "tiles" && areTilesDrawn(page, view, state.tile)) {
      drawTiles(context, view, this.tileKinds(), state.tile, origin, ink);
    }
    if (!explorer.isInitial) return; // the plans are for the original numbers
    if (state.panel === "cache" && !page.cache.error) drawStep(context, view, explorer.cache(state.t), origin, ink);
    if (state.panel === "devices") {
      const plan = explorer.devices(state.devices, state.order);
      drawDevices(context, view, plan, this.panels.devices.device, origin, ink);
    }
  }

  tileKinds() {
    const key = `${this.state.numbers} ${this.state.tile}`;
    if (this.kinds?.key !== key) this.kinds = { key, of: this.explorer.tileKinds(...this.state.tile) };
    return this.kinds.of;
  }

  // All is drawn: stores the state in the address.
  settled() {
    const { zoom, scaleX, scaleY } = this.map.view;
    const scales = `${scaleX} ${scaleY}`; // they also change with the size of the window
    if (this.scales !== scales) {
      this.scales = scales;
      this.state.zoom = zoom;
      this.showPanel();
    }
    this.writeHash();
    document.documentElement.dataset.ready = "true";
  }

  writeHash() {
    clearTimeout(this.hashTimer);
    this.hashTimer = setTimeout(() => {
      const hash = hashOf(this.page, this.state);
      if (hash === location.hash || (!hash && location.hash && !byId("problem").hidden)) return;
      try {
        history.replaceState(null, "", hash || location.pathname + location.search);
      } catch {
        // The page is inside a notebook, which has no address of its own.
      }
    }, 200);
  }

  readHash() {
    if (location.hash && location.hash === hashOf(this.page, this.state)) return;
    let problem = "";
    let state = defaultState(this.page);
    try {
      state = stateOfHash(this.page, location.hash);
    } catch (error) {
      problem = `The address is not valid: ${error.message} The page shows its defaults.`;
    }
    this.apply(state, { q: state.q, k: state.k, zoom: state.zoom });
    byId("problem").textContent = problem;
    byId("problem").hidden = !problem;
  }
}

function scaleText(scale) {
  const three = (number) => grouped(Number(number.toPrecision(3)));
  return scale >= 1 ? `${three(scale)} pixels per token` : `${three(1 / scale)} tokens per pixel`;
}

function hasCells(node) {
  const parts = node.parts ?? (node.part ? [node.part] : []);
  return node.op === "cells" || parts.some(hasCells);
}

function startPage() {
  const page = JSON.parse(byId("document").textContent);
  const app = new App(page);
  const { explorer } = app;
  window.longspan = {
    allowed: explorer.allowed,
    why: explorer.why,
    tiles(qTile, kvTile) {
      const tiles = explorer.tiles(qTile, kvTile);
      return { ...tiles, ...costsOf(page, tiles, explorer.count()) };
    },
    count: explorer.count,
    cache: explorer.cache,
    devices: explorer.devices,
    diff: explorer.diff,
    // Also takes what `state` returned, of which `expression` and `shown` follow from the rest.
    set(changes) {
      if (!isObject(changes)) throw new RangeError("set takes an object, for example {q: 5, k: 3}.");
      const { expression, shown, ...chosen } = changes;
      app.change(chosen);
    },
    place: (q, k) => app.map.placeOf(q, k),
    get state() {
      return app.shown;
    },
  };
}

startPage();
