// The first tab: charts of all metrics of the chosen runs, and the end of the log.

import { get } from "./api.js";
import { Chart, ChartGroup } from "./chart.js";
import { el, fill, stored } from "./dom.js";
import { formatOf } from "./format.js";

// What a chart shows: the metrics with one unit that belong together. Others get a chart each.
const CHARTS = [
  { group: "Training", title: "loss", keys: ["loss", "eval_loss"] },
  { group: "Training", title: "gradient norm", keys: ["grad_norm"] },
  { group: "Training", title: "learning rate", keys: ["learning_rate"] },
  { group: "Training", title: "loss scale", keys: ["loss_scale"] },
  { group: "Speed", title: "tokens per second", keys: ["tokens_per_second"], fromZero: true },
  { group: "Speed", title: "time of a step", keys: ["step_seconds"], fromZero: true },
  { group: "Speed", title: "MFU", keys: ["mfu"], fromZero: true },
  { group: "Speed", title: "TFLOPS", keys: ["tflops"], fromZero: true },
];
// Those of the algorithm and what a step costs, by what their names begin or end with.
const GROUP_OF = [
  ["Cost of a step", (key) => key.endsWith("_seconds") || key.endsWith("_bytes") || key === "power_watts" || key === "energy_joules"],
  ["Evaluation", (key) => key.startsWith("eval_")],
  ["Algorithm", () => true],
];
const HIDDEN = new Set(["step", "epoch", "tokens", "tokens_total", "skipped", "slowest_rank", "eval_tokens", "fingerprint"]);
const OPEN_AT_FIRST = new Set(["Training", "Speed", "Algorithm", "Evaluation"]);
const MAX_KEYS = 120;

export class Overview {
  constructor(panel, app) {
    this.app = app;
    this.group = new ChartGroup();
    this.charts = new Map();
    this.keys = [];
    this.range = null;
    this.settings = { axis: "step", smoothing: 0, log: false, ...stored.get("charts", {}) };
    this.filter = "";
    this.sections = el("div", {});
    this.log = el("pre", { class: "log", tabindex: "0", "aria-label": "The newest lines of the log", role: "region" });
    this.logBox = el("details", { class: "section", ontoggle: () => this.readLog() }, el("summary", {}, el("h3", {}, "Log")), this.log);
    fill(panel, this.toolbar(), this.sections, this.logBox);
  }

  toolbar() {
    const { settings } = this;
    const set = (change, redraws) => {
      Object.assign(settings, change);
      stored.set("charts", settings);
      if (redraws) this.charts.forEach(({ chart }) => chart.set({ smoothing: settings.smoothing, log: settings.log }));
      else this.zoom(null);
    };
    const axis = el("select", { id: "axis", onchange: (event) => set({ axis: event.target.value }, false) },
      [["step", "step"], ["tokens", "tokens"], ["seconds", "time"]].map(([value, name]) => el("option", { value }, name)));
    axis.value = settings.axis;
    const shown = el("output", { for: "smoothing" }, settings.smoothing.toFixed(2));
    const smoothing = el("input", {
      id: "smoothing", type: "range", min: "0", max: "0.99", step: "0.01", value: settings.smoothing,
      oninput: (event) => {
        shown.textContent = Number(event.target.value).toFixed(2);
        set({ smoothing: Number(event.target.value) }, true);
      },
    });
    const log = el("input", { id: "log", type: "checkbox", onchange: (event) => set({ log: event.target.checked }, true) });
    log.checked = settings.log;
    this.reset = el("button", { type: "button", onclick: () => this.zoom(null), disabled: true }, "Reset zoom");
    const filter = el("input", {
      id: "metric-filter", type: "search", placeholder: "Filter metrics", "aria-label": "Filter metrics",
      oninput: (event) => {
        this.filter = event.target.value.toLowerCase();
        this.arrange();
        this.refresh();
      },
    });
    return el("div", { class: "toolbar", role: "group", "aria-label": "Charts" },
      el("label", { for: "axis" }, "Axis ", axis),
      el("label", { for: "smoothing" }, "Smoothing ", smoothing, shown),
      el("label", { for: "log" }, log, " Log scale"),
      filter, this.reset,
      el("span", { class: "dim small hint" }, "Drag over a chart to zoom, double-click to see all."));
  }

  zoom(range) {
    this.range = range;
    this.reset.disabled = !range;
    this.refresh();
  }

  async update(recolored = false) {
    if (recolored) this.draw();
    await this.refresh();
    this.readLog();
  }

  /** Asks for what is new. One request at a time: while one is under way, the next one waits. */
  async refresh() {
    if (this.busy) {
      this.wanted = true;
      return;
    }
    this.busy = true;
    try {
      const runs = this.app.chartedRuns();
      const all = await Promise.all(runs.map((run) => get(`/api/runs/${run.id}/keys`)));
      if (this.closed) return;
      const keys = [...new Set(all.flatMap((one) => one.keys))].filter((key) => !HIDDEN.has(key));
      if (keys.join() !== this.keys.join()) {
        this.keys = keys;
        this.arrange();
      }
      const open = [...this.charts.values()].filter(({ section }) => section.open).flatMap(({ keys: own }) => own).slice(0, MAX_KEYS);
      await Promise.all(runs.map((run) => this.app.seriesFor(run.id, "overview").update(open, this.settings.axis, this.range)));
      if (!this.closed) this.draw();
    } catch (error) {
      if (!this.closed && this.charts.size === 0) fill(this.sections, el("p", { class: "empty" }, `Metrics cannot be read: ${error.message}`));
    } finally {
      this.busy = false;
    }
    if (this.wanted && !this.closed) {
      this.wanted = false;
      await this.refresh();
    }
  }

  /** Makes the charts for the metrics that there are. */
  arrange() {
    const left = new Set(this.keys);
    const specs = [];
    for (const spec of CHARTS) {
      const keys = spec.keys.filter((key) => left.delete(key));
      if (keys.length > 0) specs.push({ ...spec, keys });
    }
    for (const key of this.keys.filter((key) => left.has(key))) {
      const group = GROUP_OF.find(([, matches]) => matches(key))[0];
      specs.push({ group, title: key, keys: [key], fromZero: group === "Cost of a step" });
    }
    const wanted = specs.filter((spec) => `${spec.title} ${spec.keys.join(" ")}`.toLowerCase().includes(this.filter));
    this.group.clear();
    this.charts.clear();
    const sections = new Map();
    for (const name of ["Training", "Algorithm", "Evaluation", "Speed", "Cost of a step"]) {
      const of = wanted.filter((spec) => spec.group === name);
      if (of.length === 0) continue;
      const grid = el("div", { class: "grid" });
      const section = el("details", { class: "section", ontoggle: () => section.open && this.refresh() },
        el("summary", {}, el("h3", {}, name, " ", el("span", { class: "dim" }, of.length))), grid);
      section.open = this.filter !== "" || OPEN_AT_FIRST.has(name);
      sections.set(name, section);
      for (const spec of of) {
        const chart = new Chart({
          title: spec.title, format: formatOf(spec.keys[0]), group: this.group, axis: this.settings.axis,
          log: this.settings.log, smoothing: this.settings.smoothing, fromZero: spec.fromZero,
          onzoom: (range) => this.zoom(range),
        });
        this.charts.set(`${spec.group}/${spec.title}`, { chart, section, keys: spec.keys });
        grid.append(chart.node);
      }
    }
    if (this.keys.length === 0) fill(this.sections, el("p", { class: "empty" }, "No steps yet. Charts appear with the first one."));
    else if (sections.size === 0) fill(this.sections, el("p", { class: "empty" }, "No metric has this name."));
    else fill(this.sections, [...sections.values()]);
  }

  draw() {
    const runs = this.app.chartedRuns();
    for (const { chart, section, keys } of this.charts.values()) {
      if (!section.open) continue;
      chart.options.axis = this.settings.axis;
      const lines = runs.flatMap((run) => keys.map((key, i) => {
        const found = this.app.seriesFor(run.id, "overview").get(key);
        if (!found) return null;
        const isEvaluation = key.startsWith("eval_") && keys.length > 1;
        const label = [runs.length > 1 ? run.name : "", keys.length > 1 ? key : ""].filter(Boolean).join(" ");
        // With several runs, a color stands for a run.
        const color = this.app.color(runs.length > 1 ? run.id : run.id + i);
        return { ...found, label, color, dashed: isEvaluation, dots: key.startsWith("eval_") };
      }).filter(Boolean));
      chart.setLines(lines, this.range);
    }
  }

  async readLog() {
    if (!this.logBox.open || this.closed) return;
    const { lines } = await get(`/api/runs/${this.app.current}/log`).catch(() => ({ lines: [] }));
    const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
    this.log.textContent = lines.length > 0 ? lines.join("\n") : "There is no log.";
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  close() {
    this.closed = true;
    this.group.clear();
  }
}
