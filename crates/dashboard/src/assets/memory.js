// Memory: what the plan reserves, when it is used within a step, and what the run has measured.

import { Chart } from "./chart.js";
import { el, fill, style, swatch, table } from "./dom.js";
import { bytes, percent } from "./format.js";

// The kinds in their usual order, with the names that people know.
const KINDS = new Map([
  ["parameters", "parameters"], ["gradients", "gradients"], ["optimizer", "optimizer"], ["activations", "activations"],
  ["buffers", "buffers"], ["foreign", "process and libraries"],
]);
const TIERS = [["device_bytes", "device"], ["host_bytes", "host"], ["nvme_bytes", "disk"]];

export class Memory {
  constructor(panel, app) {
    [this.panel, this.app] = [panel, app];
    this.measured = new Chart({ title: "measured", format: bytes, fromZero: true });
    this.overStep = new Chart({
      title: "planned, during each operation of a step", format: bytes, axis: "operation", fromZero: true, stepped: true,
      describe: (at) => this.operations?.[Math.round(at)] ?? `operation ${Math.round(at)}`,
      onzoom: (range) => this.overStep.setLines(this.overStep.lines, range),
    });
    this.operation = el("p", { class: "status", "aria-live": "off" });
    this.bar = el("div", {});
    this.parts = el("div", {});
    const drawLegend = this.overStep.fillLegend.bind(this.overStep);
    this.overStep.fillLegend = (cursor) => {
      drawLegend(cursor);
      this.operation.textContent = cursor === null || !this.operations ? "Point at the curve to see the operation." : this.operations[Math.round(cursor)] ?? "";
    };
  }

  async update(recolored = false) {
    const run = this.app.run(this.app.current);
    if (!run) return fill(this.panel, el("p", { class: "empty" }, "There is no run."));
    const details = await this.app.detailsOf(run.id).catch(() => null);
    const series = this.app.seriesFor(run.id, "memory");
    await series.update(["memory_bytes", "memory_peak_bytes"], "step", null).catch(() => null);
    if (this.closed || !details) return;
    if (this.shown !== run.id || recolored) {
      this.shown = run.id;
      this.build(details);
    }
    this.drawMeasured(series, details);
  }

  build(details) {
    const planned = details.planned_memory_bytes ?? {};
    const names = [...new Set([...KINDS.keys(), ...Object.keys(planned)])];
    const kinds = names.filter((name) => planned[name] > 0).map((name) => [KINDS.get(name) ?? name, planned[name]]);
    const total = kinds.reduce((sum, [, size]) => sum + size, 0);
    this.total = total;
    const color = (i) => style(`--category-${i}`);
    const bar = el("div", { class: "stack", role: "img", "aria-label": `Planned memory of a rank: ${kinds.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}` },
      kinds.map(([, size], i) => {
        const part = el("span", {});
        part.style.flexGrow = size / total;
        part.style.background = color(i);
        return part;
      }));
    const legend = el("ul", { class: "legend wide" }, kinds.map(([name, size], i) =>
      el("li", {}, swatch(color(i)), `${name} `, el("b", {}, bytes(size)), el("span", { class: "dim" }, ` ${percent(size / total)}`))));
    const curve = details.plan?.memory_over_step;
    this.operations = details.plan?.operations?.length ? details.plan.operations : null;
    fill(this.panel,
      total > 0 ? el("section", { class: "card" }, el("h3", {}, `Planned for a rank: ${bytes(total)}`), bar, legend) : null,
      curve ? el("div", {}, this.overStep.node, this.operation) : null,
      this.measured.node,
      this.breakdown(details.plan?.memory),
      total === 0 && !curve ? el("p", { class: "empty" }, "An older version has written this run, without its planned memory.") : null);
    if (curve) this.drawCurve(curve);
  }

  drawCurve(curve) {
    const x = curve.live_bytes.map((_, i) => i);
    const flat = (label, size, color) => ({ label, color, x: [0, x.length - 1], y: [size, size], flat: true, dashed: true });
    this.overStep.node.querySelector("h4").textContent = `planned, during each operation of phase ${curve.phase}`;
    this.overStep.setLines([
      { label: "in use", color: style("--category-0"), x, y: curve.live_bytes },
      flat("residents", curve.resident_bytes, style("--category-3")),
      flat("arena", curve.peak_bytes, style("--category-4")),
    ]);
  }

  drawMeasured(series, details) {
    const color = this.app.color(details.id);
    const line = (key, label, dashed) => {
      const found = series.get(key);
      return found ? { ...found, label, color, dashed } : null;
    };
    const lines = [line("memory_peak_bytes", "peak", true), line("memory_bytes", "in use", false)].filter(Boolean);
    const longest = lines.find((one) => one.x.length > 0);
    if (longest && this.total > 0) {
      const ends = [longest.x[0], longest.x[longest.x.length - 1]];
      lines.push({ label: "planned", color: style("--dim"), x: ends, y: [this.total, this.total], flat: true, dashed: true });
    }
    this.measured.setLines(lines);
  }

  /** The groups of the plan with their parts. */
  breakdown(memory) {
    if (!memory) return null;
    const cells = (group) => TIERS.map(([key]) => (group[key] > 0 ? bytes(group[key]) : ""));
    const rows = [];
    for (const group of [memory.residents, ...(memory.phases ?? [])].filter(Boolean)) {
      rows.push([el("b", {}, group.name ?? ""), ...cells(group)]);
      for (const part of group.parts ?? []) rows.push([el("span", { class: "inset" }, part.name ?? ""), ...cells(part)]);
    }
    rows.push(["process, libraries, data", ...cells(memory.overhead ?? {})], [el("b", {}, "total"), ...cells(memory.total ?? {})]);
    return el("section", { class: "card" }, el("h3", {}, "Where the planned bytes go"),
      table("Planned memory of a rank", ["part", ...TIERS.map(([, name]) => name)], rows));
  }

  close() {
    this.closed = true;
    this.measured.destroy();
    this.overStep.destroy();
  }
}
