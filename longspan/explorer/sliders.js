// The expression with its numbers, and a slider and a field for each number that can change.

const LEAST_REACH = 32; // the greatest value of a slider, at least

class ExpressionEditor {
  // `onChange(numbers)` is called when the user changes a number.
  constructor(page, explorer, onChange) {
    this.page = page;
    this.explorer = explorer;
    this.onChange = onChange;
    this.rows = page.numbers.map((number, index) => this.row(number, index));
    byId("numbers").replaceChildren(...this.rows.filter((row) => !row.fixed).map((row) => row.root));
    this.listFixed();
    byId("copy").addEventListener("click", () => this.copy());
    byId("reset").addEventListener("click", () => onChange(page.numbers.map((number) => number.value)));
  }

  row(number, index) {
    const name = this.nameOf(number, index);
    const bounds = { min: number.least, max: number.greatest };
    const slider = element("input", { type: "range", id: `slider-${index}`, "aria-label": name, step: 1 });
    const field = element("input", { type: "number", id: `number-${index}`, "aria-label": name, ...bounds });
    const root = element("div", { class: "number" }, element("span", { class: "name" }, name), slider, field);
    const made = { root, slider, field, number, name, fixed: number.fixed };
    this.reach(made, number.value);
    slider.addEventListener("input", () => this.change(index, slider.valueAsNumber));
    slider.addEventListener("change", () => {
      this.change(index, slider.valueAsNumber);
      this.reach(made, slider.valueAsNumber); // the next drag may go further
    });
    field.addEventListener("input", () => this.typed(made, index));
    field.addEventListener("change", () => {
      field.value = this.explorer.numbers[index];
      field.removeAttribute("aria-invalid");
    });
    for (const input of [slider, field]) {
      input.addEventListener("focus", () => this.mark(index, true));
      input.addEventListener("blur", () => this.mark(index, false));
    }
    root.addEventListener("pointerenter", () => this.mark(index, true));
    root.addEventListener("pointerleave", () => this.mark(index, false));
    return made;
  }

  // "Window left", or "Global indices 2" for the second one of several.
  nameOf(number, index) {
    const { mask, numbers } = this.page;
    const leaf = leafOf(mask.tree, number.leaf);
    const words = [number.field.replace(/_/g, " ")];
    if (leaf) words.unshift(mask.text.slice(leaf.start).match(/^\w*/)[0]);
    const isAlike = (other) => other.leaf === number.leaf && other.field === number.field;
    if (numbers.filter(isAlike).length > 1) words.push(numbers.slice(0, index).filter(isAlike).length + 1);
    return words.join(" ");
  }

  // Sets the ends of a slider: about four times the value, so that small numbers can be set exactly.
  reach({ slider, number }, value) {
    const high = Math.max(2 ** Math.ceil(Math.log2(Math.max(4 * Math.abs(value), LEAST_REACH))), value);
    slider.max = Math.min(number.greatest, Math.max(Math.min(high, number.high), value));
    slider.min = number.least >= 0 ? number.least : Math.max(number.least, Math.min(-slider.max, value));
    slider.value = value;
  }

  typed(row, index) {
    const { field, number } = row;
    const value = field.valueAsNumber;
    const isLegal = Number.isInteger(value) && value >= number.least && value <= number.greatest;
    if (isLegal) field.removeAttribute("aria-invalid");
    else field.setAttribute("aria-invalid", "true");
    if (!isLegal) return;
    this.reach(row, value);
    this.change(index, value);
  }

  change(index, value) {
    const numbers = this.explorer.numbers;
    if (numbers[index] === value) return;
    numbers[index] = value;
    this.onChange(numbers);
  }

  // Shows the numbers of the explorer.
  show() {
    const { numbers } = this.explorer;
    const parts = [];
    let at = 0;
    this.page.numbers.forEach(({ start, stop, value, fixed }, i) => {
      const isChanged = numbers[i] !== value;
      const kind = `literal${isChanged ? " changed" : ""}${fixed === null ? "" : " fixed"}`;
      const literal = element("span", { class: kind, "data-number": i }, String(numbers[i]));
      parts.push(this.page.mask.text.slice(at, start), literal);
      at = stop;
    });
    parts.push(this.page.mask.text.slice(at));
    byId("expression").replaceChildren(...parts);
    this.rows.forEach((row, i) => {
      if (document.activeElement !== row.field) row.field.value = numbers[i];
      if (row.slider.valueAsNumber === numbers[i]) return;
      if (numbers[i] < Number(row.slider.min) || numbers[i] > Number(row.slider.max)) this.reach(row, numbers[i]);
      row.slider.value = numbers[i];
    });
    byId("reset").hidden = this.explorer.isInitial;
  }

  mark(index, isMarked) {
    byId("expression").querySelector(`[data-number="${index}"]`)?.classList.toggle("marked", isMarked);
  }

  listFixed() {
    const fixed = this.rows.filter((row) => row.fixed);
    const list = byId("fixed-numbers");
    list.hidden = !fixed.length;
    if (!fixed.length) return;
    for (const { slider, field } of fixed) slider.disabled = field.disabled = true;
    const items = fixed.map(({ root, number }) => element("div", {}, root, element("p", { class: "reason" }, number.fixed)));
    list.replaceChildren(element("summary", {}, `${counted(fixed.length, "number")} that cannot change here`), ...items);
  }

  async copy() {
    const button = byId("copy");
    button.textContent = (await copyText(this.explorer.text)) ? "Copied" : "Select and copy";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  }
}

function leafOf(tree, index) {
  if (tree.op === "leaf") return tree.leaf === index ? tree : null;
  for (const part of tree.parts) {
    const found = leafOf(part, index);
    if (found) return found;
  }
  return null;
}

// Copies a text. Some browsers allow this only in pages from a server; then the text is selected instead.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(byId("expression"));
    return document.execCommand("copy");
  }
}
