// Samples: what the model has generated, with its rewards.

import { get } from "./api.js";
import { el, fill } from "./dom.js";
import { number } from "./format.js";

const PAGE = 10;

export class Samples {
  constructor(panel, app) {
    [this.panel, this.app] = [panel, app];
    this.step = "";
    this.skip = 0;
  }

  async update() {
    const run = this.app.run(this.app.current);
    if (!run) return fill(this.panel, el("p", { class: "empty" }, "There is no run."));
    if (this.shown !== run.id) [this.shown, this.step, this.skip, this.known] = [run.id, "", 0, null];
    let page;
    try {
      page = await get(`/api/runs/${run.id}/completions`, { step: this.step || null, skip: this.skip, count: PAGE });
    } catch (error) {
      return fill(this.panel, el("p", { class: "empty" }, `Completions cannot be read: ${error.message}`));
    }
    // Text that somebody reads must not move: an older page stays as it is.
    const known = JSON.stringify([this.step, this.skip, page.total, page.items.length]);
    if (this.closed || known === this.known) return;
    this.known = known;
    if (page.total === 0) {
      return fill(this.panel, el("p", { class: "empty" }, "This run has generated nothing. Runs of PPO, GRPO and RLOO show their completions here, with their rewards."));
    }
    this.draw(page);
  }

  go(change) {
    Object.assign(this, change);
    this.known = null;
    this.update();
  }

  draw(page) {
    const choice = el("select", { id: "sample-step", onchange: (event) => this.go({ step: event.target.value, skip: 0 }) },
      el("option", { value: "" }, "all steps, the newest first"), page.steps.map((step) => el("option", { value: step }, `step ${step}`)));
    choice.value = this.step;
    const last = Math.min(page.total, this.skip + PAGE);
    const button = (name, skip, possible) => el("button", { type: "button", disabled: !possible, onclick: () => this.go({ skip }) }, name);
    fill(this.panel,
      el("div", { class: "toolbar" }, el("label", { for: "sample-step" }, "Show ", choice),
        button("Newer", Math.max(0, this.skip - PAGE), this.skip > 0), button("Older", this.skip + PAGE, last < page.total),
        el("span", { class: "dim small" }, `${this.skip + 1} to ${last} of ${page.total}`),
        page.older_exist ? el("span", { class: "dim small" }, "Older ones are in completions.jsonl.") : null),
      page.items.map((item) => this.card(item)));
  }

  card(item) {
    const text = (name, { text: content, cut }) => el("div", { class: "text" }, el("h4", {}, name),
      el("pre", { tabindex: "0", role: "region", "aria-label": name }, content), cut ? el("p", { class: "dim small" }, "The rest is in completions.jsonl.") : null);
    const fact = (name, value) => el("li", {}, el("span", { class: "dim" }, `${name} `), el("b", {}, number(value)));
    return el("article", { class: "card sample" },
      el("header", {}, el("h3", {}, `step ${number(item.step)}`),
        el("ul", { class: "legend wide" }, fact("reward", item.reward), item.advantage === null ? null : fact("advantage", item.advantage),
          item.rewards.map(({ name, reward }) => fact(name, reward)), item.truncated ? el("li", { class: "pill stopped" }, "truncated") : null)),
      text("prompt", item.prompt), text("completion", item.completion));
  }

  close() {
    this.closed = true;
  }
}
