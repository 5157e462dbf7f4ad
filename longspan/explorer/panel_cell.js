// The cell panel: why a query may or may not attend to a key.

class CellPanel {
  constructor(app) {
    this.app = app;
    const { page } = app;
    for (const [id, length] of [["cell-q", page.q_len], ["cell-k", page.kv_len]]) {
      byId(id).max = Math.max(length - 1, 0);
      byId(id).addEventListener("change", () => this.typed());
    }
  }

  typed() {
    const [q, k] = ["cell-q", "cell-k"].map((id) => byId(id).valueAsNumber);
    const { page } = this.app;
    if (q >= 0 && k >= 0 && q < page.q_len && k < page.kv_len) this.app.selectCell({ q, k });
  }

  show(state) {
    const { page, explorer } = this.app;
    const cell = this.app.hover ?? (state.q === null ? null : { q: state.q, k: state.k });
    byId("cell-hint").hidden = cell !== null;
    byId("cell-found").hidden = cell === null;
    for (const [id, slot] of [["cell-q", state.q], ["cell-k", state.k]]) {
      if (document.activeElement !== byId(id)) byId(id).value = slot ?? "";
    }
    if (!cell) return { q: null, k: null };
    const why = explorer.why(cell.q, cell.k);
    byId("cell-answer").replaceChildren(truthMark(why.allowed), element("span", {}, answerText(cell, why.allowed)));
    fillTable(byId("cell-facts"), cellFacts(page, why));
    const trees = [treeList(why.tree)];
    if (why.other) {
      trees.unshift(element("h3", {}, "First mask"));
      trees.push(element("h3", {}, "Second mask"), treeList(why.other.tree));
    }
    byId("cell-tree").replaceChildren(...trees);
    return { q: cell.q, k: cell.k, ...why };
  }
}

const TRUTHS = {
  true: ["yes", "\u2713", "allowed"],
  false: ["no", "\u2717", "not allowed"],
  null: ["unknown", "?", "not known"],
};

// A mark that also has a text for screen readers.
function truthMark(truth) {
  const [kind, sign, words] = TRUTHS[truth];
  return element("span", { class: `truth ${kind}`, role: "img", "aria-label": words }, sign);
}

function answerText({ q, k }, truth) {
  const pair = `Query ${grouped(q)}`;
  if (truth === null) return `${pair}, key ${grouped(k)}: the page does not know this pair.`;
  return `${pair} ${truth ? "may attend" : "may not attend"} to key ${grouped(k)}.`;
}

function cellFacts(page, why) {
  const sides = [why.q, why.k];
  const rows = [["", "Query", "Key"], ["slot", ...sides.map((side) => grouped(side.slot))]];
  rows.push(["position", ...sides.map((side) => grouped(side.position))]);
  rows.push(["distance", "", distanceText(why.k.position - why.q.position)]);
  if (page.documents) rows.push(["document", ...sides.map((side) => documentName(side.document))]);
  if (page.tokens) rows.push(["token", ...sides.map(({ token }) => element("code", { class: "token" }, token))]);
  return rows;
}

const documentName = (id) => (id < 0 ? "padding" : grouped(id));

function distanceText(distance) {
  if (!distance) return "same position";
  return distance < 0 ? `key is ${grouped(-distance)} before` : `key is ${grouped(distance)} after`;
}

const OPERATORS = { and: "all of these", or: "any of these", not: "not this" };

// The expression as nested lists, with a mark for each part.
function treeList(tree) {
  return element("ul", { class: "tree" }, treeItem(tree));
}

function treeItem(node) {
  if (node.op === "leaf") {
    return element("li", {}, element("div", {}, truthMark(node.allowed), element("code", {}, node.text)));
  }
  const words = node.op === "per_head" ? `head ${node.head}` : OPERATORS[node.op];
  const line = element("div", {}, truthMark(node.allowed), element("span", { class: "operator" }, words));
  return element("li", {}, line, element("ul", {}, ...node.parts.map(treeItem)));
}

// The sentences that a screen reader reads.
function spokenAnswer(cell, why) {
  const leaves = [];
  const visit = (node) => (node.op === "leaf" ? leaves.push(node) : node.parts.forEach(visit));
  visit(why.tree);
  const parts = leaves.map((leaf) => `${leaf.text}: ${TRUTHS[leaf.allowed][2]}`);
  return `${answerText(cell, why.allowed)} ${parts.join("; ")}.`;
}
