// The diff panel: where the mask and another one differ.

const JUMP_CELL = 14; // pixels along a cell, at least, after a jump to a difference

class DiffPanel {
  constructor(app) {
    this.app = app;
    this.first = new Map(); // the first difference by the numbers of the expression
    byId("next-difference").addEventListener("click", () => this.next());
  }

  show() {
    const { page, explorer } = this.app;
    const hasOther = page.other !== null;
    byId("diff-none").hidden = hasOther;
    byId("diff-found").hidden = !hasOther;
    if (!hasOther) return explorer.diff();
    const key = String(explorer.numbers);
    if (!this.first.has(key)) {
      if (page.q_len * page.kv_len > QUICK_PAIRS) {
        this.app.later(`diff ${key}`, () => this.first.set(key, explorer.diff()));
        byId("diff-answer").textContent = "Comparing \u2026";
        return { pending: true };
      }
      this.first.set(key, explorer.diff());
    }
    const found = this.first.get(key);
    byId("first-text").textContent = explorer.text;
    byId("second-text").textContent = page.other.text;
    byId("diff-answer").textContent = differenceText(found);
    byId("next-difference").disabled = found.pair === null;
    return found;
  }

  // Selects the first differing pair after the selected cell; after the last one, the first of all.
  next() {
    const { explorer, state } = this.app;
    const after = state.q === null ? [-1, -1] : [state.q, state.k];
    let found = explorer.diff(...after);
    let isFirst = state.q === null;
    if (found.pair === null) {
      found = explorer.diff();
      isFirst = true;
    }
    if (found.pair === null) return;
    const { q, k, allowed_by: by } = found.pair;
    this.app.selectCell({ q, k }, { leastCell: JUMP_CELL });
    const which = isFirst ? "First difference" : "Next difference";
    byId("diff-here").textContent = `${which}: query ${grouped(q)}, key ${grouped(k)}, allowed by the ${by} mask only.`;
  }
}

function differenceText({ same, pair, complete }) {
  if (pair) {
    const { q, k, allowed_by: by } = pair;
    return `The masks differ. The first differing pair is query ${grouped(q)}, key ${grouped(k)}: only the ${by} mask allows it.`;
  }
  if (same) return "The masks are the same: they allow the same pairs.";
  return complete ? "No other pair differs." : "No difference was found, but the page cannot compare every pair.";
}
