// The expression with its numbers, and a slider and a field for each number that can change.

const LEAST_REACH = 32; // the greatest value of a slider, at least
const MOST_LISTED = 6; // entries of a tuple that are listed beside the other numbers

class ExpressionEditor {
  // `onChange(numbers)` is called when the user changes a number.
  constructor(page, explorer, onChange) {
    this.page = page;
    this.explorer = explorer;
    this.onChange = onChange;
    this.rows = page.numbers.map((number, index) => this.row(number, index));
    this.list();
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
    const { numbers } = this.page;
    const words = [number.rule, number.field.replace(/_/g, " ")];
    if (numbers.filter(isOfField(number)).length > 1) words.push(numbers.slice(0, index).filter(isOfField(number)).length + 1);
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
      const literal = element("span", { class: kind, "data-number": i }, numberText(this.page, numbers, i));
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

  // Long tuples are folded, so that the other numbers stay in sight.
  list() {
    const free = this.rows.filter((row) => !row.fixed);
    const isFolded = ({ number }) => this.page.numbers.filter(isOfField(number)).length > MOST_LISTED;
    byId("numbers").replaceChildren(...free.filter((row) => !isFolded(row)).map((row) => row.root));
    const folded = free.filter(isFolded);
    for (const first of folded.filter(({ number }, i) => i === 0 || !isOfField(number)(folded[i - 1].number))) {
      const rows = folded.filter(({ number }) => isOfField(number)(first.number)).map((row) => row.root);
      const { rule, field } = first.number;
      const summary = element("summary", {}, `${rule} ${field.replace(/_/g, " ")}: ${counted(rows.length, "number")}`);
      const list = element("div", { class: "number-list" }, ...rows);
      byId("numbers").after(element("details", { class: "more-numbers" }, summary, list));
    }
  }

  listFixed() {
    const fixed = this.rows.filter((row) => row.fixed);
    const list = byId("fixed-numbers");
    list.hidden = !fixed.length;
    if (!fixed.length) return;
    for (const { slider, field } of fixed) slider.disabled = field.disabled = true;
    const items = fixed.map(({ root, number }) => element("div", {}, root, element("p", { class: "reason" }, number.fixed)));
    const summary = element("summary", {}, `${counted(fixed.length, "number")} that cannot change here`);
    list.replaceChildren(summary, element("div", { class: "number-list" }, ...items));
  }

  async copy() {
    const button = byId("copy");
    button.textContent = (await copyText(this.explorer.text)) ? "Copied" : "Select and copy";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  }
}

// Whether a number is in the same field of the same rule: the entries of a tuple.
const isOfField = (number) => (other) => other.leaf === number.leaf && other.field === number.field;

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
