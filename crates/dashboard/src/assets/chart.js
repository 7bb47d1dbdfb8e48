// A line chart on two canvases: one for the lines, which change with the data, and one above it for the cursor, which
// follows the pointer. So moving the pointer costs the same for a hundred points and for a hundred thousand.

import { el, style, swatch, table } from "./dom.js";
import { axisFormat, logTicks, number, ticks } from "./format.js";

const MARGIN = { left: 58, right: 12, top: 10, bottom: 24 };
const HEIGHT = 210;
const TABLE_ROWS = 200;
// A drag is a click if it is shorter.
const MIN_DRAG = 6;
const FONT = "11px system-ui, sans-serif";

/** The exponential moving average of numbers; `weight` of 0 leaves them. It has no bias towards the first one. */
export function smoothed(values, weight) {
  if (weight <= 0) return values;
  let [sum, norm] = [0, 0];
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** The first index whose value is at least `x`, in ascending values. */
export function lowerBound(values, x) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Charts whose cursors move together. */
export class ChartGroup {
  constructor() {
    this.charts = new Set();
    this.cursor = null;
  }

  setCursor(x) {
    this.cursor = x;
    for (const chart of this.charts) chart.drawCursor();
  }

  clear() {
    for (const chart of this.charts) chart.destroy();
    this.charts.clear();
  }
}

export class Chart {
  /**
   * `options`: title, format, axis, log, smoothing, group, onzoom, height; `fixedRange` for a chart that does not follow
   * the group's zoom; `stepped` draws steps instead of slopes; `describe(x)` adds text to the cursor's position.
   */
  constructor(options) {
    this.options = { axis: "step", format: number, smoothing: 0, log: false, height: HEIGHT, ...options };
    this.lines = [];
    this.range = null;
    this.smoothCache = new Map();
    this.base = el("canvas", { "aria-hidden": "true" });
    this.over = el("canvas", { "aria-hidden": "true", class: "over" });
    this.plot = el("div", {
      class: "plot", tabindex: "0", role: "slider", "aria-label": `${this.options.title}, cursor`,
      "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "no data",
      onpointerdown: (event) => this.startDrag(event),
      onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.endDrag(event),
      onpointercancel: () => this.cancelDrag(),
      onpointerleave: () => this.leave(),
      ondblclick: () => this.options.onzoom?.(null),
      onkeydown: (event) => this.key(event),
    }, this.base, this.over);
    this.plot.style.height = `${this.options.height}px`;
    this.legend = el("ul", { class: "legend" });
    this.data = el("details", { class: "data", ontoggle: () => this.fillTable() }, el("summary", {}, "Table"));
    this.node = el("figure", { class: "chart" },
      el("figcaption", {}, el("h4", {}, this.options.title), this.legend), this.plot, this.data);
    this.options.group?.charts.add(this);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.plot);
  }

  destroy() {
    this.observer.disconnect();
  }

  /**
   * `lines`: `{label, color, x, y, low, high, not_finite, dashed, dots}`, with ascending `x`. `range` is what the
   * horizontal axis shows, or `null` for everything.
   */
  setLines(lines, range = null) {
    this.lines = lines;
    this.range = range;
    this.smoothCache.clear();
    this.plot.classList.toggle("blank", lines.length === 0);
    this.draw();
    if (this.data.open) this.fillTable();
  }

  set(options) {
    Object.assign(this.options, options);
    this.smoothCache.clear();
    this.draw();
  }

  shown(line) {
    if (line.dots || line.flat) return line.y;
    let values = this.smoothCache.get(line);
    if (!values) {
      values = smoothed(line.y, this.options.smoothing);
      this.smoothCache.set(line, values);
    }
    return values;
  }

  /** The ranges of both axes, from the points that are in view. */
  measure() {
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const line of this.lines.filter((line) => line.x.length > 0)) {
      left = Math.min(left, line.x[0]);
      right = Math.max(right, line.x[line.x.length - 1]);
    }
    if (this.range) [left, right] = [this.range.from, this.range.to];
    for (const line of this.lines) {
      const lows = line.low?.length && !this.options.smoothing ? line.low : this.shown(line);
      const highs = line.high?.length && !this.options.smoothing ? line.high : this.shown(line);
      const end = Math.min(line.x.length, lowerBound(line.x, right) + 1);
      for (let i = Math.max(0, lowerBound(line.x, left) - 1); i < end; i++) {
        if (this.options.log && !(lows[i] > 0)) continue;
        if (lows[i] < low) low = lows[i];
        if (highs[i] > high) high = highs[i];
      }
    }
    if (!(low <= high)) return null;
    if (this.options.fromZero) low = Math.min(0, low);
    if (left === right) [left, right] = [left - 1, right + 1];
    if (this.options.log) {
      const room = Math.max(1.05, (high / low) ** 0.05);
      return { left, right, low: low / room, high: high * room };
    }
    const room = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
    return { left, right, low: this.options.fromZero ? low : low - room, high: high + room };
  }

  draw() {
    const { clientWidth: width } = this.plot;
    const { height } = this.options;
    if (width === 0) return;
    const ratio = Math.min(3, devicePixelRatio || 1);
    for (const canvas of [this.base, this.over]) {
      if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
      }
    }
    const ctx = this.base.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    const bounds = this.measure();
    this.scale = bounds && this.scales(bounds, width, height);
    if (!this.scale) {
      ctx.fillStyle = style("--dim");
      ctx.font = FONT;
      ctx.fillText(this.options.log ? "no positive numbers" : "no numbers yet", MARGIN.left, height / 2);
    } else {
      this.drawAxes(ctx, width, height);
      ctx.save();
      ctx.beginPath();
      ctx.rect(MARGIN.left, 0, width - MARGIN.left - MARGIN.right, height - MARGIN.bottom);
      ctx.clip();
      for (const line of this.lines) this.drawLine(ctx, line, height);
      ctx.restore();
    }
    this.drawCursor();
  }

  scales(bounds, width, height) {
    const { left, right, low, high } = bounds;
    const across = width - MARGIN.left - MARGIN.right;
    const down = height - MARGIN.top - MARGIN.bottom;
    const place = this.options.log ? Math.log : (value) => value;
    const [bottom, top] = [place(low), place(high)];
    return {
      ...bounds,
      x: (value) => MARGIN.left + ((value - left) / (right - left)) * across,
      y: (value) => MARGIN.top + (1 - (place(value) - bottom) / (top - bottom)) * down,
      atX: (pixel) => left + ((pixel - MARGIN.left) / across) * (right - left),
    };
  }

  drawAxes(ctx, width, height) {
    const { left, right, low, high, x, y } = this.scale;
    ctx.font = FONT;
    ctx.lineWidth = 1;
    ctx.strokeStyle = style("--grid");
    ctx.fillStyle = style("--dim");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const marks = this.options.log ? logTicks(low, high) : ticks(low, high, 6, this.options.format);
    for (const value of marks) {
      const at = Math.round(y(value)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(MARGIN.left, at);
      ctx.lineTo(width - MARGIN.right, at);
      ctx.stroke();
      ctx.fillText(this.options.format(Number(value.toPrecision(10))), MARGIN.left - 6, at);
    }
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    const format = axisFormat(this.options.axis);
    const steps = ticks(left, right, Math.max(2, Math.floor(width / 75)));
    for (const value of steps.filter((value) => this.options.axis === "seconds" || right - left < 4 || Number.isInteger(value))) {
      ctx.fillText(format(value), Math.min(width - 24, x(value)), height - MARGIN.bottom + 7);
    }
  }

  drawLine(ctx, line, height) {
    const { x, y } = this.scale;
    const start = Math.max(0, lowerBound(line.x, this.scale.left) - 1);
    const end = Math.min(line.x.length, lowerBound(line.x, this.scale.right) + 2);
    const softened = this.options.smoothing > 0 && !line.dots && !line.flat;
    if (line.low?.length) this.drawBand(ctx, line, start, end, softened ? 0.1 : 0.22);
    else if (softened) this.trace(ctx, line.x, line.y, start, end, line.color, 1, 0.28);
    if (line.dashed) ctx.setLineDash([5, 4]);
    this.trace(ctx, line.x, this.shown(line), start, end, line.color, line.dashed ? 1.3 : 1.7, 1);
    ctx.setLineDash([]);
    if (line.dots || end - start === 1) {
      ctx.fillStyle = line.color;
      const every = Math.max(1, Math.floor((end - start) / 120));
      for (let i = start; i < end; i += every) {
        ctx.beginPath();
        ctx.arc(x(line.x[i]), y(line.y[i]), 2.6, 0, 7);
        ctx.fill();
      }
    }
    // Numbers that are not finite: a mark at the bottom, whatever the color.
    ctx.fillStyle = style("--bad");
    for (const [at] of line.not_finite ?? []) {
      const [px, py] = [x(at), height - MARGIN.bottom];
      ctx.beginPath();
      ctx.moveTo(px - 4, py);
      ctx.lineTo(px + 4, py);
      ctx.lineTo(px, py - 8);
      ctx.fill();
    }
  }

  drawBand(ctx, line, start, end, alpha) {
    const { x, y } = this.scale;
    const usable = (value) => !this.options.log || value > 0;
    ctx.beginPath();
    for (let i = start; i < end; i++) if (usable(line.high[i])) ctx.lineTo(x(line.x[i]), y(line.high[i]));
    for (let i = end - 1; i >= start; i--) if (usable(line.low[i])) ctx.lineTo(x(line.x[i]), y(line.low[i]));
    ctx.globalAlpha = alpha;
    ctx.fillStyle = line.color;
    ctx.fill();
    ctx.globalAlpha = 1;
  }

  /** Draws a line. Where several points fall on a column of pixels, only its first, lowest, highest and last are drawn. */
  trace(ctx, xs, ys, start, end, color, lineWidth, alpha) {
    const { x, y } = this.scale;
    ctx.beginPath();
    ctx.strokeStyle = color;
    ctx.lineWidth = lineWidth;
    ctx.globalAlpha = alpha;
    ctx.lineJoin = "round";
    let [column, low, high, last, lastY] = [null, 0, 0, 0, null];
    const dense = end - start > 2 * (this.base.clientWidth || 600);
    for (let i = start; i < end; i++) {
      if (this.options.log && !(ys[i] > 0)) continue;
      const [px, py] = [x(xs[i]), y(ys[i])];
      if (!dense) {
        if (this.options.stepped && lastY !== null) ctx.lineTo(px, lastY);
        ctx.lineTo(px, py);
        lastY = py;
        continue;
      }
      if (Math.floor(px) !== column) {
        if (column !== null) {
          ctx.lineTo(column, low);
          ctx.lineTo(column, high);
          ctx.lineTo(column, last);
        }
        [column, low, high] = [Math.floor(px), py, py];
        ctx.lineTo(column, py);
      }
      [low, high, last] = [Math.min(low, py), Math.max(high, py), py];
    }
    if (column !== null) {
      ctx.lineTo(column, low);
      ctx.lineTo(column, high);
      ctx.lineTo(column, last);
    }
    ctx.stroke();
    ctx.globalAlpha = 1;
  }

  /** The point of a line next to a position. */
  nearest(line, at) {
    const i = lowerBound(line.x, at);
    if (line.x.length === 0) return -1;
    if (i === 0) return 0;
    if (i === line.x.length) return i - 1;
    return at - line.x[i - 1] < line.x[i] - at ? i - 1 : i;
  }

  drawCursor() {
    const { width, height } = this.over;
    const ratio = Math.min(3, devicePixelRatio || 1);
    const ctx = this.over.getContext("2d");
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    const cursor = this.cursorNow();
    if (this.scale && cursor !== null && cursor >= this.scale.left && cursor <= this.scale.right) {
      const at = Math.round(this.scale.x(cursor)) + 0.5;
      ctx.strokeStyle = style("--cursor");
      ctx.beginPath();
      ctx.moveTo(at, MARGIN.top);
      ctx.lineTo(at, this.options.height - MARGIN.bottom);
      ctx.stroke();
      for (const line of this.lines) {
        const i = this.nearest(line, cursor);
        const value = i >= 0 ? this.shown(line)[i] : null;
        if (value === null || (this.options.log && !(value > 0))) continue;
        ctx.fillStyle = line.color;
        ctx.beginPath();
        ctx.arc(this.scale.x(line.x[i]), this.scale.y(value), 3.5, 0, 7);
        ctx.fill();
      }
    }
    if (this.drag && Math.abs(this.drag.now - this.drag.start) > MIN_DRAG) {
      ctx.fillStyle = style("--select");
      ctx.fillRect(this.drag.start, MARGIN.top, this.drag.now - this.drag.start, this.options.height - MARGIN.top - MARGIN.bottom);
    }
    this.fillLegend(cursor);
  }

  cursorNow() {
    return this.options.group ? this.options.group.cursor : this.ownCursor ?? null;
  }

  setCursor(x) {
    if (this.options.group) this.options.group.setCursor(x);
    else {
      this.ownCursor = x;
      this.drawCursor();
    }
  }

  /** The values at the cursor, or the newest ones. */
  fillLegend(cursor) {
    const items = this.lines.filter((line) => line.x.length > 0).map((line) => {
      const i = cursor === null ? line.x.length - 1 : this.nearest(line, cursor);
      return [line, this.options.format(this.shown(line)[i])];
    });
    const key = items.map(([line, value]) => `${line.label}=${value}${line.color}`).join();
    if (key !== this.legendKey) {
      this.legendKey = key;
      this.legend.replaceChildren(...items.map(([line, value]) =>
        el("li", {}, swatch(line.color), line.label ? el("span", { class: "label" }, line.label) : "", el("b", {}, value))));
    }
    if (this.scale) {
      const at = cursor ?? this.scale.right;
      const place = this.options.describe?.(at) ?? `${this.options.axis} ${axisFormat(this.options.axis)(at)}`;
      const text = items.map(([line, value]) => `${line.label || this.options.title} ${value}`).join(", ");
      this.plot.setAttribute("aria-valuemin", this.scale.left);
      this.plot.setAttribute("aria-valuemax", this.scale.right);
      this.plot.setAttribute("aria-valuenow", Math.min(this.scale.right, Math.max(this.scale.left, at)));
      this.plot.setAttribute("aria-valuetext", `${place}: ${text || "no data"}`);
    }
  }

  startDrag(event) {
    if (event.button !== 0 || !this.scale) return;
    this.drag = { start: event.offsetX, now: event.offsetX };
    this.plot.setPointerCapture?.(event.pointerId);
  }

  move(event) {
    if (!this.scale) return;
    if (this.drag) this.drag.now = event.offsetX;
    const inside = Math.min(this.plot.clientWidth - MARGIN.right, Math.max(MARGIN.left, event.offsetX));
    // At most one drawing for each picture of the screen.
    this.pending = this.scale.atX(inside);
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.setCursor(this.pending);
    });
  }

  endDrag() {
    const { drag } = this;
    this.cancelDrag();
    if (!drag || !this.scale || Math.abs(drag.now - drag.start) <= MIN_DRAG) return;
    const ends = [drag.start, drag.now].map((pixel) => this.scale.atX(pixel)).sort((a, b) => a - b);
    this.options.onzoom?.({ from: Math.max(ends[0], this.scale.left), to: Math.min(ends[1], this.scale.right) });
  }

  cancelDrag() {
    this.drag = null;
    this.drawCursor();
  }

  leave() {
    if (this.drag) return;
    if (this.frame) cancelAnimationFrame(this.frame);
    this.frame = null;
    this.setCursor(null);
  }

  /** Arrows move the cursor by a point, with Shift by a tenth; + and - zoom at the cursor, 0 shows everything. */
  key(event) {
    if (!this.scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const { left, right } = this.scale;
    const longest = this.lines.reduce((best, line) => (line.x.length > (best?.x.length ?? 0) ? line : best), null);
    const at = this.cursorNow() ?? right;
    const by = event.shiftKey ? 0.1 : 0;
    const moved = (sign) => {
      if (by || !longest) return at + sign * (right - left) * (by || 0.01);
      return longest.x[Math.min(longest.x.length - 1, Math.max(0, this.nearest(longest, at) + sign))];
    };
    const zoomed = (factor) => {
      const half = ((right - left) * factor) / 2;
      return { from: at - half, to: at + half };
    };
    const actions = {
      ArrowLeft: () => this.setCursor(moved(-1)),
      ArrowRight: () => this.setCursor(moved(1)),
      Home: () => this.setCursor(left),
      End: () => this.setCursor(right),
      Escape: () => this.setCursor(null),
      "+": () => this.options.onzoom?.(zoomed(0.5)),
      "-": () => this.options.onzoom?.(zoomed(2)),
      0: () => this.options.onzoom?.(null),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  /** The numbers behind the lines, as a table; of long series, evenly spread points. */
  fillTable() {
    if (!this.data.open) return;
    const xs = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const every = Math.max(1, Math.ceil(xs.length / TABLE_ROWS));
    const rows = xs.filter((_, i) => i % every === 0 || i === xs.length - 1).map((x) => [
      axisFormat(this.options.axis)(x),
      ...this.lines.map((line) => {
        const i = lowerBound(line.x, x);
        return line.x[i] === x ? this.options.format(line.y[i]) : "";
      }),
    ]);
    const head = [this.options.axis, ...this.lines.map((line) => line.label || this.options.title)];
    this.data.replaceChildren(this.data.firstElementChild, table(`Numbers of ${this.options.title}`, head, rows));
  }
}
