// The page: the list of runs, the tabs, and following what changes.

import { RunSeries, get } from "./api.js";
import { announce, byId, el, fill, runColor, stored, swatch } from "./dom.js";
import { bytes, duration, number, percent, short } from "./format.js";
import { Overview } from "./overview.js";
import { Timeline } from "./timeline.js";
import { Memory } from "./memory.js";
import { Ranks } from "./ranks.js";
import { Samples } from "./samples.js";
import { Configuration } from "./configuration.js";

const VIEWS = { overview: Overview, timeline: Timeline, memory: Memory, ranks: Ranks, samples: Samples, configuration: Configuration };
const RETRY_MS = 2000;
const FILTER_FROM = 8;
// What a click must not do: draw a hundred runs.
const MAX_CHARTED = 12;

const app = {
  runs: [],
  revision: 0,
  // The run that all tabs are about, and those whose lines are in the charts.
  current: null,
  charted: new Set(),
  tab: "overview",
  view: null,
  series: new Map(),
  details: new Map(),

  run: (id) => app.runs.find((run) => run.id === id),
  color: (id) => runColor(id),
  chartedRuns: () => app.runs.filter((run) => app.charted.has(run.id)),

  seriesOf(id) {
    if (!app.series.has(id)) app.series.set(id, new Map());
    return app.series.get(id);
  },

  /** The series of a run for one use; each use asks for other keys. */
  seriesFor(id, use) {
    const of = app.seriesOf(id);
    if (!of.has(use)) of.set(use, new RunSeries(id));
    return of.get(use);
  },

  async detailsOf(id) {
    const known = app.details.get(id);
    if (known?.revision === app.revision) return known.details;
    const details = await get(`/api/runs/${id}`);
    app.details.set(id, { details, revision: app.revision });
    return details;
  },
};

/** What the address says: the tab, the run and the runs in the charts. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (VIEWS[given.get("tab")]) app.tab = given.get("tab");
  const ids = (given.get("runs") ?? "").split(",").filter((text) => /^\d+$/.test(text)).map(Number);
  if (given.get("run") !== null && /^\d+$/.test(given.get("run"))) app.current = Number(given.get("run"));
  app.charted = new Set(ids.slice(0, MAX_CHARTED));
}

function writeAddress() {
  const given = new URLSearchParams({ tab: app.tab, run: app.current ?? "", runs: [...app.charted].join(",") });
  history.replaceState(null, "", `#${given}`);
}

function chooseRuns() {
  if (app.runs.length === 0) return;
  if (!app.run(app.current)) {
    const running = app.runs.filter((run) => run.state === "running");
    const newest = (runs) => runs.reduce((best, run) => (run.started > best.started ? run : best), runs[0]);
    app.current = newest(running.length > 0 ? running : app.runs).id;
  }
  app.charted = new Set([...app.charted].filter((id) => app.run(id)));
  if (app.charted.size === 0) app.charted.add(app.current);
}

function openRun(id) {
  if (app.charted.size === 1 && app.charted.has(app.current)) app.charted.clear();
  app.current = id;
  app.charted.add(id);
  changed();
}

function chart(id, wanted) {
  if (wanted && app.charted.size < MAX_CHARTED) app.charted.add(id);
  else app.charted.delete(id);
  if (app.charted.size === 0) app.charted.add(app.current);
  changed();
}

/** Another run or other runs are wanted. */
function changed() {
  writeAddress();
  drawRuns();
  drawHead();
  app.view?.update();
}

const stateName = (state) => (state === "-" ? "unknown" : state);
const pill = (state) => el("span", { class: `pill ${stateName(state)}` }, stateName(state));

function drawRuns() {
  const filter = byId("run-filter");
  filter.hidden = app.runs.length < FILTER_FROM;
  const wanted = filter.value.toLowerCase();
  const shown = app.runs.filter((run) => `${run.name} ${run.path}`.toLowerCase().includes(wanted));
  byId("run-count").textContent = app.runs.length > 0 ? String(app.runs.length) : "";
  const focused = document.activeElement?.dataset?.focus;
  fill(byId("runs"), shown.map((run) => {
    const box = el("input", {
      type: "checkbox", "aria-label": `Draw ${run.name} in the charts`, "data-focus": `box-${run.id}`,
      onchange: (event) => chart(run.id, event.target.checked),
    });
    box.checked = app.charted.has(run.id);
    const steps = run.total_steps > 0 ? `${short(run.step)} / ${short(run.total_steps)}` : short(run.step);
    return el("li", { class: run.id === app.current ? "current" : null },
      box, swatch(app.color(run.id)),
      el("button", {
        type: "button", class: "run", title: run.path, "data-focus": `run-${run.id}`,
        "aria-current": run.id === app.current ? "true" : null, onclick: () => openRun(run.id),
      }, el("span", { class: "name" }, run.name),
      el("span", { class: "dim small" }, el("span", { class: `state ${run.state}` }, stateName(run.state)), ` · ${steps} · loss ${number(run.loss)}`)));
  }));
  if (focused) document.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
  if (app.runs.length === 0) {
    fill(byId("runs"), el("li", { class: "dim" }, "No runs yet. They appear here when they write their first file."));
  }
}

function tile(label, value, note = "") {
  return el("div", { class: "tile" }, el("dt", {}, label), el("dd", {}, value, note ? el("small", {}, note) : null));
}

function drawHead() {
  const run = app.run(app.current);
  if (!run) return fill(byId("head"));
  const done = run.total_steps > 0 ? run.step / run.total_steps : null;
  const bar = el("progress", { max: "1", value: done ?? 0, "aria-label": `Progress of ${run.name}` });
  const share = run.planned_bytes > 0 && run.memory_bytes ? `of ${bytes(run.planned_bytes)}` : "";
  const silent = run.state === "stopped" && run.silent_seconds ? ` ${duration(run.silent_seconds)} ago` : "";
  fill(byId("head"),
    el("div", { class: "title" }, swatch(app.color(run.id)), el("h2", {}, run.name), pill(run.state),
      el("span", { class: "dim" }, silent ? `last written${silent}` : "")),
    el("p", { class: "dim small facts" }, [
      run.path, run.device, run.ranks ? `${run.ranks} rank${run.ranks === 1 ? "" : "s"}` : null,
      run.parameters ? `${short(run.parameters)} parameters` : null, run.started ? `started ${run.started.slice(0, 16).replace("T", " ")} UTC` : null,
    ].filter(Boolean).join(" · ")),
    run.problem ? el("p", { role: "alert", class: "problem" }, run.problem) : null,
    done === null ? null : bar,
    el("dl", { class: "tiles" },
      tile("step", String(run.step), run.total_steps > 0 ? `of ${run.total_steps}` : ""),
      tile("loss", number(run.loss)),
      run.eval_loss === null ? null : tile("eval loss", number(run.eval_loss)),
      tile("tokens / s", short(run.tokens_per_second)),
      tile("time of a step", duration(run.step_seconds)),
      run.mfu === null ? null : tile("MFU", percent(run.mfu)),
      run.memory_bytes === null ? null : tile("peak memory", bytes(run.memory_bytes), share),
      run.state === "running" && run.remaining_seconds !== null ? tile("time left", duration(run.remaining_seconds)) : null));
}

function drawTabs() {
  const names = Object.keys(VIEWS);
  const open = (name) => {
    showTab(name);
    byId(`tab-${name}`).focus();
  };
  fill(byId("tabs"), names.map((name) => el("button", {
    type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(name === app.tab), "aria-controls": "panel",
    tabindex: name === app.tab ? "0" : "-1", onclick: () => open(name),
    onkeydown: (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const to = by ? (names.indexOf(name) + by + names.length) % names.length : { Home: 0, End: names.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(names[to]);
    },
  }, name[0].toUpperCase() + name.slice(1))));
  byId("panel").setAttribute("aria-labelledby", `tab-${app.tab}`);
}

function showTab(name) {
  app.view?.close?.();
  app.tab = name;
  drawTabs();
  writeAddress();
  fill(byId("panel"));
  app.view = new VIEWS[name](byId("panel"), app);
  app.view.update();
}

function connected(text, kind) {
  const node = byId("connection");
  if (node.textContent !== text) node.textContent = text;
  node.className = `pill ${kind}`;
}

function take(list) {
  const running = list.runs.some((run) => run.state === "running");
  connected(running ? "live" : "connected", running ? "running" : "finished");
  app.runs = list.runs;
  app.revision = list.revision;
  byId("version").textContent = list.version;
  const before = app.current;
  chooseRuns();
  const run = app.run(app.current);
  document.title = run ? `${run.name} ${run.total_steps > 0 ? `${Math.floor((100 * run.step) / run.total_steps)} % ` : ""}– Lockstep` : "Lockstep";
  drawRuns();
  drawHead();
  if (before !== app.current) writeAddress();
  app.view?.update();
  if (run) announce(`${run.name}: ${run.state}, step ${run.step}, loss ${number(run.loss)}`);
}

/** Asks for changes for as long as the page is open and in view. */
async function follow() {
  for (;;) {
    if (document.hidden) {
      await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
      continue;
    }
    try {
      take(await get("/api/wait", { revision: app.revision }));
      // A run of a hundred steps per second need not draw as often.
      await new Promise((later) => setTimeout(later, 300));
    } catch {
      connected("not connected", "stopped");
      announce("The connection to the server is lost.", true);
      await new Promise((later) => setTimeout(later, RETRY_MS));
      // When it answers again, it may be another server, with other runs.
      app.revision = null;
      app.series.clear();
      app.details.clear();
    }
  }
}

/** The colors of the page: the system's, or those that the user has chosen. */
function themes() {
  const button = byId("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (stored.get("theme", null) ?? (system.matches ? "dark" : "light")) === "dark";
  const apply = () => {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${isDark() ? "light" : "dark"} colors`);
    drawRuns();
    drawHead();
    app.view?.update(true);
  };
  button.addEventListener("click", () => {
    stored.set("theme", isDark() ? "light" : "dark");
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}

readAddress();
themes();
if (matchMedia("(max-width: 800px)").matches) byId("runs-box").open = false;
byId("run-filter").addEventListener("input", drawRuns);
addEventListener("hashchange", () => {
  const before = app.tab;
  readAddress();
  chooseRuns();
  if (app.tab !== before) showTab(app.tab);
  changed();
});
try {
  take(await get("/api/runs"));
} catch {
  connected("not connected", "stopped");
}
showTab(app.tab);
follow();
