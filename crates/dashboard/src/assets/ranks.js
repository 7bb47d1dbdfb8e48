// Ranks: how long each one worked in each step, and who waits for whom.

import { Chart } from "./chart.js";
import { el, fill, style, table } from "./dom.js";
import { duration, number, percent } from "./format.js";

const MAX_RANKS = 64;
const ROW = 14;
const LEFT = 56;
const WAITS = ["gather_wait_seconds", "reduce_wait_seconds", "norm_wait_seconds", "update_wait_seconds", "copy_wait_seconds", "exchange_wait_seconds", "data_wait_seconds"];

export class Ranks {
  constructor(panel, app) {
    [this.panel, this.app] = [panel, app];
    this.canvas = el("canvas", { role: "img", "aria-label": "Busy time of each rank over the run; the table has the numbers", onpointermove: (event) => this.point(event) });
    this.status = el("p", { class: "status", "aria-live": "off" }, "Point at a step to see the time of a rank.");
    this.waits = new Chart({ title: "waiting within a step", format: duration, fromZero: true });
    this.totals = el("div", {});
    this.observer = new ResizeObserver(() => this.draw());
  }

  async update(recolored = false) {
    const run = this.app.run(this.app.current);
    if (!run) return fill(this.panel, el("p", { class: "empty" }, "There is no run."));
    const count = Math.min(run.ranks, MAX_RANKS);
    const keys = Array.from({ length: count > 1 ? count : 0 }, (_, i) => `rank_busy_seconds/${i}`);
    const series = this.app.seriesFor(run.id, "ranks");
    await series.update([...keys, ...WAITS, "step_seconds", "slowest_rank"], "step", null).catch(() => null);
    if (this.closed) return;
    const ranks = keys.map((key) => series.get(key)).filter(Boolean);
    if (this.shown !== `${run.id}/${ranks.length > 0}`) {
      this.shown = `${run.id}/${ranks.length > 0}`;
      fill(this.panel,
        ranks.length > 0
          ? el("section", { class: "card" }, el("h3", {}, "Busy time of each rank"), this.status, this.canvas,
            el("p", { class: "dim small" }, "Dark: the rank worked for as long as the slowest one in that step. Light: it waited for others."))
          : el("p", { class: "empty" }, run.ranks > MAX_RANKS ? `The metrics have no times of single ranks beyond ${MAX_RANKS} ranks.` : "This run has a single rank, so no rank waits for another."),
        this.totals, this.waits.node);
      if (ranks.length > 0) this.observer.observe(this.canvas.parentElement);
    }
    this.ranks = ranks;
    if (ranks.length > 0) {
      this.measure(series);
      this.draw();
      this.fillTotals(series.get("step_seconds"));
    }
    this.drawWaits(series, recolored);
  }

  /** The most that a rank worked in each step. */
  measure() {
    const columns = this.ranks[0].x.length;
    this.most = Array.from({ length: columns }, (_, i) => Math.max(...this.ranks.map((rank) => rank.y[i] ?? 0)));
  }

  draw() {
    if (!this.ranks?.length || this.closed) return;
    const width = this.canvas.parentElement.clientWidth - 24;
    if (width <= LEFT) return;
    const height = this.ranks.length * ROW + 4;
    const ratio = Math.min(3, devicePixelRatio || 1);
    [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
    [this.canvas.style.width, this.canvas.style.height] = [`${width}px`, `${height}px`];
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    const columns = this.most.length;
    this.column = (px) => Math.floor(((px - LEFT) / (width - LEFT)) * columns);
    const cell = (width - LEFT) / columns;
    const fillColor = style("--heat");
    this.ranks.forEach((rank, row) => {
      ctx.globalAlpha = 1;
      ctx.fillStyle = style("--dim");
      ctx.fillText(`rank ${row}`, 0, row * ROW + ROW / 2);
      ctx.fillStyle = fillColor;
      for (let i = 0; i < columns; i++) {
        const share = this.most[i] > 0 ? (rank.y[i] ?? 0) / this.most[i] : 0;
        ctx.globalAlpha = 0.06 + 0.94 * share ** 2;
        ctx.fillRect(LEFT + i * cell, row * ROW + 1, Math.max(0.6, cell - (cell > 4 ? 1 : 0)), ROW - 2);
      }
    });
    ctx.globalAlpha = 1;
  }

  point(event) {
    const [row, i] = [Math.floor(event.offsetY / ROW), this.column?.(event.offsetX)];
    const rank = this.ranks?.[row];
    if (!rank || !(i >= 0) || rank.y[i] === undefined) return;
    this.status.textContent = `rank ${row} was busy for ${duration(rank.y[i])} in step ${number(rank.x[i])}, ${percent(rank.y[i] / this.most[i])} of the slowest rank`;
  }

  fillTotals(steps) {
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);
    const step = steps ? mean(steps.y) : null;
    const slowest = this.ranks.map((rank) => rank.y.filter((value, i) => value === this.most[i]).length / rank.y.length);
    const rows = this.ranks.map((rank, i) => {
      const busy = mean(rank.y);
      return [`rank ${i}`, duration(busy), step ? percent(busy / step) : "–", step ? duration(Math.max(0, step - busy)) : "–", percent(slowest[i])];
    });
    fill(this.totals, el("section", { class: "card" },
      table("Busy time of each rank", ["rank", "busy in a step", "share of the step", "waiting", "slowest in"], rows)));
  }

  drawWaits(series) {
    const lines = WAITS.map((key, i) => {
      const found = series.get(key);
      return found ? { ...found, label: key.replace("_wait_seconds", ""), color: style(`--category-${i}`) } : null;
    });
    this.waits.setLines(lines.filter(Boolean));
  }

  close() {
    this.closed = true;
    this.observer.disconnect();
    this.waits.destroy();
  }
}
