// Elements and numbers of the page. Text always enters as text, never as HTML.

const byId = (id) => document.getElementById(id);

// An element with attributes and children; children are elements or texts, and null is left out.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const grouped = (number) => (number < 0 ? "\u2212" : "") + Math.abs(number).toLocaleString("en-US");

// "1 row", "2 rows", "1,024 rows"
const counted = (number, noun, plural = `${noun}s`) => `${grouped(number)} ${number === 1 ? noun : plural}`;

// A share as in Longspan's pictures: never 0% or 100% unless it is exact.
function percent(part, whole) {
  if (!whole || part === 0) return "0%";
  if (part === whole) return "100%";
  const share = (100 * part) / whole;
  if (share < 0.001) return "< 0.001%";
  if (share > 99.99) return "> 99.99%";
  if (share < 1) return `${share.toPrecision(2)}%`;
  return `${share > 99 ? share.toFixed(2) : share.toFixed(1)}%`;
}

const PREFIXES = { 1000: ["", "k", "M", "G", "T", "P", "E"], 1024: ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"] };

// A number with four significant digits and its unit, as `explain` prints it.
function short(amount, unit, step) {
  let value = amount;
  let power = 0;
  while (value >= step && power < PREFIXES[step].length - 1) {
    value /= step;
    power += 1;
  }
  return `${Number(value.toPrecision(4))} ${PREFIXES[step][power]}${unit}`;
}

// "0 to 47, 90": half-open spans as the tokens they contain; at most `most` of them.
function spansText(spans, most = 6) {
  const listed = spans.slice(0, most).map(([start, stop]) => {
    if (stop - start === 1) return grouped(start);
    return `${grouped(start)} to ${grouped(stop - 1)}`;
  });
  if (spans.length > most) listed.push(`and ${counted(spans.length - most, "more span")}`);
  return listed.join(", ") || "none";
}

// Fills a table of names and values. A value is a text, or an element.
function fillTable(table, rows) {
  table.replaceChildren(
    ...rows.map(([name, ...values]) =>
      element("tr", {}, element("th", { scope: "row" }, name), ...values.map((value) => element("td", {}, value)))
    )
  );
}
