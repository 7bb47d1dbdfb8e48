// Profiled steps: when each operation ran, a row for each lane of each rank.

import { get } from "./api.js";
import { el, fill, style, table } from "./dom.js";
import { duration, percent, ticks } from "./format.js";

const ROW = 24;
const RANK_GAP = 8;
const LEFT = 116;
const TOP = 24;
const MIN_WIDTH_US = 0.5;
const FONT = "11px system-ui, sans-serif";
// Activities keep their colors from one profile to the next; others share the last one.
const CATEGORIES = ["forward", "backward", "update", "head", "objective", "reduce", "norm", "gather", "copy", "step", "data", "exchange"];

export class Timeline {
  constructor(panel, app) {
    [this.panel, this.app] = [panel, app];
  }

  async update(recolored = false) {
    const run = this.app.run(this.app.current);
    if (!run) return fill(this.panel, el("p", { class: "empty" }, "There is no run."));
    const { timelines } = await this.app.detailsOf(run.id).catch(() => ({ timelines: [] }));
    if (this.closed) return;
    const known = `${run.id}/${timelines.join()}`;
    if (known === this.known) return recolored ? this.draw() : undefined;
    this.known = known;
    if (timelines.length === 0) {
      return fill(this.panel, el("p", { class: "empty" },
        "No steps of this run were profiled. ", el("code", {}, "--profile-steps 10:12"), " records when every operation of steps 10 to 12 runs, on every rank."));
    }
    this.build(run, timelines);
    await this.load(run.id, timelines.length - 1);
  }

  build(run, timelines) {
    const choice = el("select", { id: "timeline", onchange: (event) => this.load(run.id, Number(event.target.value)) },
      timelines.map((name, i) => el("option", { value: i }, name)));
    choice.value = timelines.length - 1;
    const button = (name, act) => el("button", { type: "button", onclick: act }, name);
    this.canvas = el("canvas", {
      tabindex: "0", role: "img", "aria-label": "Timeline of operations; the table below has the totals",
      onpointerdown: (event) => this.startDrag(event), onpointermove: (event) => this.move(event),
      onpointerup: () => this.endDrag(), onpointerleave: () => this.point(null), onkeydown: (event) => this.key(event),
    });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.status = el("p", { class: "status", "aria-live": "polite" }, "");
    this.legend = el("ul", { class: "legend wide" });
    this.totals = el("div", {});
    this.notice = el("p", { class: "dim" });
    fill(this.panel,
      el("div", { class: "toolbar" }, el("label", { for: "timeline" }, "Profile ", choice),
        button("Zoom in", () => this.zoom(0.5)), button("Zoom out", () => this.zoom(2)), button("Show all", () => this.show(0, this.end)),
        el("span", { class: "dim small hint" }, "Drag to move, Ctrl and the wheel or + and - to zoom.")),
      this.legend, this.status, el("div", { class: "card" }, this.canvas), this.notice, this.totals);
    this.observer?.disconnect();
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas.parentElement);
  }

  async load(id, index) {
    this.status.textContent = "Reading the profile";
    try {
      this.data = await get(`/api/runs/${id}/timelines/${index}`);
    } catch (error) {
      this.status.textContent = `The profile cannot be read: ${error.message}`;
      return;
    }
    if (this.closed) return;
    this.end = Math.max(this.data.end_us, 1);
    for (const track of this.data.tracks) track.spans.sort((a, b) => a[0] - b[0]);
    this.status.textContent = "Point at an operation to see its name and time.";
    this.notice.textContent = this.data.cut ? "The profile has more operations than a page can show; the last ones are missing." : "";
    this.fillTables();
    this.show(0, this.end);
  }

  /** Where each track is drawn: tracks of a rank follow each other. */
  rows() {
    let [y, rank] = [TOP, null];
    return this.data.tracks.map((track) => {
      if (rank !== null && rank !== track.rank) y += RANK_GAP;
      rank = track.rank;
      y += ROW;
      return { track, y: y - ROW };
    });
  }

  show(from, to) {
    const width = Math.max(MIN_WIDTH_US, Math.min(this.end, to - from));
    this.from = Math.max(0, Math.min(from, this.end - width));
    this.to = this.from + width;
    this.draw();
  }

  zoom(factor, at = (this.from + this.to) / 2) {
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  color(category) {
    const known = CATEGORIES.indexOf(this.data.categories[category]);
    return style(`--category-${known < 0 ? CATEGORIES.length : known}`);
  }

  draw() {
    if (!this.data || this.closed) return;
    const rows = this.rows();
    const width = this.canvas.parentElement.clientWidth - 24;
    const height = (rows.at(-1)?.y ?? TOP) + ROW + 6;
    const ratio = Math.min(3, devicePixelRatio || 1);
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    [this.canvas.style.width, this.canvas.style.height] = [`${width}px`, `${height}px`];
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.font = FONT;
    this.x = (us) => LEFT + ((us - this.from) / (this.to - this.from)) * (width - LEFT);
    this.at = (px) => this.from + ((px - LEFT) / (width - LEFT)) * (this.to - this.from);
    ctx.textBaseline = "middle";
    for (const us of ticks(this.from, this.to, Math.max(2, width / 140))) {
      ctx.fillStyle = style("--grid");
      ctx.fillRect(this.x(us), TOP - 4, 1, height);
      ctx.fillStyle = style("--dim");
      ctx.fillText(duration(us / 1e6), this.x(us) + 3, 10);
    }
    const colors = this.data.categories.map((_, i) => this.color(i));
    for (const { track, y } of rows) {
      ctx.fillStyle = style("--text");
      ctx.fillText(clipped(ctx, `${track.rank} ${track.name}`, LEFT - 8), 0, y + ROW / 2);
      ctx.save();
      ctx.beginPath();
      ctx.rect(LEFT, y, width - LEFT, ROW);
      ctx.clip();
      this.drawSpans(ctx, track.spans, y, colors);
      ctx.restore();
    }
  }

  drawSpans(ctx, spans, y, colors) {
    let drawn = -1;
    for (const [start, length, name, category] of spans) {
      if (start > this.to) break;
      if (start + length < this.from) continue;
      const [x, end] = [this.x(start), this.x(start + length)];
      // Several spans on one pixel are drawn once.
      if (end - x < 1 && x - drawn < 0.5) continue;
      drawn = Math.max(end, x + 0.5);
      ctx.fillStyle = colors[category];
      ctx.fillRect(x, y + 2, Math.max(0.7, end - x - 0.5), ROW - 4);
      if (end - x > 34) {
        ctx.fillStyle = style("--on-category");
        const from = Math.max(x, LEFT);
        ctx.fillText(clipped(ctx, this.data.names[name], end - from - 8), from + 4, y + ROW / 2);
      }
    }
  }

  /** The span at a position, if there is one. */
  spanAt(px, py) {
    const row = this.rows().find(({ y }) => py >= y && py < y + ROW);
    if (!row || px < LEFT) return null;
    const us = this.at(px);
    const slack = (this.to - this.from) / 500;
    const found = row.track.spans.filter(([start, length]) => us >= start - slack && us <= start + length + slack);
    const [shortest] = found.sort((a, b) => a[1] - b[1]);
    return shortest ? { track: row.track, span: shortest } : null;
  }

  point(found) {
    if (!found) return;
    const [start, length, name, category] = found.span;
    this.status.textContent = `${this.data.names[name]} (${this.data.categories[category]}): ${duration(length / 1e6)} from ${duration(start / 1e6)} on ${found.track.name} of rank ${found.track.rank}`;
  }

  startDrag(event) {
    this.drag = { x: event.offsetX, from: this.from };
    this.canvas.setPointerCapture?.(event.pointerId);
  }

  move(event) {
    if (!this.data) return;
    if (!this.drag) return this.point(this.spanAt(event.offsetX, event.offsetY));
    const moved = this.at(event.offsetX) - this.at(this.drag.x);
    const width = this.to - this.from;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.show(this.drag ? this.drag.from - moved : this.from, (this.drag ? this.drag.from - moved : this.from) + width));
  }

  endDrag() {
    this.drag = null;
  }

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event.offsetX));
  }

  key(event) {
    const width = this.to - this.from;
    const actions = {
      ArrowLeft: () => this.show(this.from - width / 5, this.to - width / 5),
      ArrowRight: () => this.show(this.from + width / 5, this.to + width / 5),
      "+": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.show(0, this.end),
    };
    if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  }

  /** Where the time goes: by category for each lane, and the longest operations. */
  fillTables() {
    const { tracks, categories, names } = this.data;
    fill(this.legend, categories.map((name, i) => {
      const mark = el("span", { class: "swatch", "aria-hidden": "true" });
      mark.style.background = this.color(i);
      return el("li", {}, mark, name || "other");
    }));
    const busy = tracks.map((track) => {
      const sums = categories.map(() => 0);
      for (const [, length, , category] of track.spans) sums[category] += length;
      const total = sums.reduce((sum, one) => sum + one, 0);
      return [`rank ${track.rank} ${track.name}`, percent(total / this.end), ...sums.map((sum) => (sum > 0 ? duration(sum / 1e6) : ""))];
    });
    const totals = new Map();
    for (const track of tracks) {
      for (const [, length, name] of track.spans) {
        const sum = totals.get(name) ?? { count: 0, length: 0, longest: 0 };
        totals.set(name, { count: sum.count + 1, length: sum.length + length, longest: Math.max(sum.longest, length) });
      }
    }
    const longest = [...totals].sort((a, b) => b[1].length - a[1].length).slice(0, 20);
    fill(this.totals,
      el("h3", {}, "Time by activity"), table("Time by activity of each lane", ["lane", "busy", ...categories.map((name) => name || "other")], busy),
      el("h3", {}, "Longest operations"), table("Longest operations over all ranks", ["operation", "times", "total", "longest"],
        longest.map(([name, sum]) => [names[name], sum.count, duration(sum.length / 1e6), duration(sum.longest / 1e6)])));
  }

  close() {
    this.closed = true;
    this.observer?.disconnect();
  }
}

/** A text that fits a width, with dots at its end if it is cut. */
function clipped(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let length = Math.max(0, Math.floor((text.length * width) / ctx.measureText(text).width) - 1);
  while (length > 0 && ctx.measureText(`${text.slice(0, length)}…`).width > width) length--;
  return length > 0 ? `${text.slice(0, length)}…` : "";
}
