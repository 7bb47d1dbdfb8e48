// Configuration: all settings with where they come from, what differs between runs, and how to repeat a run.

import { get } from "./api.js";
import { announce, el, fill, table } from "./dom.js";

export class Configuration {
  constructor(panel, app) {
    [this.panel, this.app] = [panel, app];
    this.filter = "";
    this.only = "changed";
  }

  async update() {
    const run = this.app.run(this.app.current);
    if (!run) return fill(this.panel, el("p", { class: "empty" }, "There is no run."));
    const others = this.app.chartedRuns().filter((other) => other.id !== run.id);
    const runs = [run, ...others];
    const known = runs.map((one) => `${one.id}${one.started}`).join();
    if (known === this.known) return;
    const [rows, details] = await Promise.all([
      get("/api/config", { runs: runs.map((one) => one.id).join(",") }),
      this.app.detailsOf(run.id),
    ]).catch(() => [null, null]);
    if (this.closed || !rows) return;
    this.known = known;
    [this.rows, this.runs] = [rows, runs];
    if (runs.length === 1 && this.only === "differs") this.only = "changed";
    if (runs.length > 1 && !this.chosen) this.only = "differs";
    this.build(details);
  }

  build(details) {
    const names = [["changed", "settings that differ from their defaults"], ["differs", "settings that differ between the runs"], ["all", "all settings"]];
    const choice = el("select", {
      id: "settings", onchange: (event) => {
        [this.only, this.chosen] = [event.target.value, true];
        this.drawRows();
      },
    }, names.filter(([value]) => value !== "differs" || this.runs.length > 1).map(([value, name]) => el("option", { value }, name)));
    choice.value = this.only;
    const filter = el("input", {
      type: "search", placeholder: "Filter settings", "aria-label": "Filter settings", value: this.filter,
      oninput: (event) => {
        this.filter = event.target.value.toLowerCase();
        this.drawRows();
      },
    });
    this.list = el("div", {});
    fill(this.panel,
      details.command ? el("section", { class: "card" }, el("h3", {}, "Repeat this run"), this.copyable(details.command)) : null,
      el("section", { class: "card" }, el("h3", {}, this.runs.length > 1 ? "Settings of the chosen runs" : "Settings"),
        el("div", { class: "toolbar" }, el("label", { for: "settings" }, "Show ", choice), filter), this.list),
      details.config ? el("details", { class: "section" }, el("summary", {}, el("h3", {}, "Configuration file")), this.copyable(details.config)) : null);
    this.drawRows();
  }

  copyable(text) {
    const copy = async () => {
      await navigator.clipboard.writeText(text).then(() => announce("Copied.", true), () => announce("The browser does not allow copying.", true));
    };
    // Browsers give the clipboard to secure pages only: those of this machine, or through TLS.
    return el("div", { class: "copy" }, el("pre", { tabindex: "0", role: "region", "aria-label": "Text to copy" }, text),
      navigator.clipboard ? el("button", { type: "button", onclick: copy }, "Copy") : null);
  }

  drawRows() {
    const isDefault = (cell) => !cell || cell.origin === "default";
    const wanted = this.rows.filter((row) => {
      const text = `${row.key} ${row.runs.map((cell) => cell?.value ?? "").join(" ")}`.toLowerCase();
      if (!text.includes(this.filter)) return false;
      if (this.only === "differs") return row.differs;
      return this.only === "all" || !row.runs.every(isDefault);
    });
    if (wanted.length === 0) {
      const text = this.only === "differs" && !this.filter ? "The settings of these runs are the same." : "There is no such setting.";
      return fill(this.list, el("p", { class: "dim" }, text));
    }
    const cell = (content) => content === null
      ? el("span", { class: "dim" }, "–")
      : el("div", {}, el("code", {}, content.value), content.origin ? el("div", { class: "dim small" }, content.origin) : null);
    const rows = wanted.map((row) => [el("span", { class: row.differs && this.runs.length > 1 ? "differs" : null }, row.key), ...row.runs.map(cell)]);
    fill(this.list, table("Settings", ["setting", ...this.runs.map((run) => run.name)], rows));
  }

  close() {
    this.closed = true;
  }
}
