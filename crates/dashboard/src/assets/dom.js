// Builds elements. Text becomes text nodes only, so markup in the names and texts of runs is shown and never interpreted.

/** An element. `on…` properties are listeners; `null` and `false` leave an attribute out. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return node;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

/** Replaces the content of an element. */
export function fill(node, ...children) {
  node.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
}

export const byId = (id) => document.getElementById(id);

/** A table with a header row; the first cell of each row is its header. Cells may be elements. */
export function table(caption, head, rows) {
  const cell = (content, i) =>
    i === 0 ? el("th", { scope: "row" }, content) : el("td", { class: typeof content === "number" ? "number" : null }, content);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {},
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell))))));
}

/** Reports to screen readers, and not more often than they can read. */
let announcedAt = 0;
export function announce(text, urgent = false) {
  const now = Date.now();
  if (!urgent && now - announcedAt < 20000) return;
  announcedAt = now;
  byId("announcer").textContent = text;
}

/** The value of a custom property of the style sheet. */
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const PALETTE_SIZE = 8;
export const runColor = (id) => style(`--series-${id % PALETTE_SIZE}`);

/** A mark with the color of a run. */
export function swatch(color) {
  const mark = el("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = color;
  return mark;
}

/** Settings that the browser keeps, if it may. */
export const stored = {
  get(key, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`lockstep-${key}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem(`lockstep-${key}`, JSON.stringify(value));
    } catch {
      // A private window keeps nothing.
    }
  },
};
