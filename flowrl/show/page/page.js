// The page: which run and view is shown, what is new, and who draws it.
import { ask } from "./ask.js";
import { fill, h, hideCard } from "./dom.js";
import { number, percent, plural, seconds } from "./words.js";
import * as curves from "./curves.js";
import * as rows from "./rows.js";
import * as graph from "./graph.js";
import * as time from "./time.js";
import * as ledger from "./ledger.js";
import * as events from "./events.js";
import * as about from "./about.js";

const VIEWS = { curves, rows, graph, time, ledger, events, about };
const POLL = 2000; // milliseconds between two questions for what is new
export const COLOURS = ["#2f6fd0", "#d9822b", "#2e9e6b", "#8e5bd0", "#c8453b", "#0e97a5", "#a0870b", "#b4239a"];

// What is shown. `chosen` is the run of all views but the curves, which overlay those that are `overlaid`.
export const page = { runs: [], chosen: null, overlaid: new Set(), program: null, view: "curves", words: {} };
let drawn = null; // the view that is on the screen: { update, leave }
let revisions = "";

function readAddress() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  page.words = Object.fromEntries(new URLSearchParams(query ?? ""));
  page.view = view in VIEWS ? view : "curves";
  if (page.words.run && page.runs.some((run) => run.id === page.words.run)) page.chosen = page.words.run;
  if (page.words.program !== undefined) page.program = page.words.program;
}

export function go(view, words = {}) {
  const query = new URLSearchParams({ run: page.chosen, ...(page.program ? { program: page.program } : {}), ...words });
  location.hash = `#/${view}?${query}`;
}

export function remember(words) { // the words of this view, without drawing it anew
  page.words = { ...page.words, ...words };
  for (const [name, value] of Object.entries(page.words)) if (value === "" || value === null || value === undefined) delete page.words[name];
  history.replaceState(null, "", `#/${page.view}?${new URLSearchParams(page.words)}`);
}

export const mainProgram = (known) => (known.includes(run()?.program) ? run().program : null);
export const run = () => page.runs.find((one) => one.id === page.chosen);
export const colour = (id) => COLOURS[page.runs.findIndex((one) => one.id === id) % COLOURS.length];

function drawHead() {
  const shown = run();
  document.title = shown ? `${shown.label} · flowrl` : "flowrl";
  fill(document.getElementById("title"), h("bdi", {}, shown ? shown.label : "flowrl"));
  fill(document.getElementById("state"), shown ? stateOf(shown) : "");
  fill(document.getElementById("views"), Object.entries(VIEWS).map(([name, view]) => {
    const count = view.count && shown ? view.count(shown) : "";
    return h("a", { href: `#/${name}?${new URLSearchParams({ run: page.chosen ?? "" })}`, "aria-current": page.view === name ? "page" : null },
      view.title, count ? h("span", { class: "count" }, count) : null);
  }));
}

const STATES = { running: "running", done: "done", failed: "failed", interrupted: "stopped" };

function stateOf(shown) {
  const parts = [h("span", { class: `pill ${shown.status}` }, STATES[shown.status] ?? (shown.status || "no record"))];
  parts.push(h("span", {}, plural(shown.lines, "step")));
  if (shown.seconds) parts.push(h("span", {}, seconds(shown.seconds)));
  if (shown.reward !== null) parts.push(h("span", {}, `reward ${number(shown.reward)}`));
  if (shown.indexed < 0.999) parts.push(h("span", { class: "faint" }, `read ${percent(shown.indexed)} of its files`));
  if (shown.note) parts.push(h("span", { class: "warn" }, shown.note));
  return parts;
}

function drawRuns() {
  const list = document.getElementById("runs");
  list.hidden = page.runs.length < 2;
  if (list.hidden) return;
  fill(list, h("h2", {}, "Runs"), h("ul", {}, page.runs.map((one) => h("li", { class: one.id === page.chosen ? "chosen" : null },
    h("input", {
      type: "checkbox", checked: page.overlaid.has(one.id), "aria-label": `Show the curves of ${one.label}`,
      vars: { "accent-color": colour(one.id) },
      on: { change: (event) => overlay(one.id, event.target.checked) },
    }),
    h("button", { type: "button", on: { click: () => choose(one.id) }, title: one.label },
      h("bdi", {}, one.label), h("small", {}, `${STATES[one.status] ?? "–"} · ${plural(one.lines, "step")}`,
        one.reward === null ? "" : ` · ${number(one.reward)}`)),
  ))));
}

function overlay(id, on) {
  page.overlaid[on ? "add" : "delete"](id);
  drawn?.update(true);
}

function choose(id) {
  page.chosen = id;
  page.program = null;
  page.overlaid.add(id);
  go(page.view);
}

function drawView() {
  drawn?.leave?.();
  hideCard();
  const place = document.getElementById("view");
  place.className = page.view;
  fill(place);
  drawn = VIEWS[page.view].draw(place);
}

async function poll() {
  try {
    const { runs } = await ask("runs");
    const first = page.runs.length === 0;
    page.runs = runs;
    if (first && runs.length) {
      page.chosen = runs.reduce((a, b) => ((b.started ?? 0) > (a.started ?? 0) ? b : a)).id;
      runs.slice(0, 8).forEach((one) => page.overlaid.add(one.id));
      readAddress();
      page.overlaid.add(page.chosen);
    }
    const seen = JSON.stringify(runs);
    if (seen !== revisions) {
      revisions = seen;
      drawHead();
      drawRuns();
      if (first) drawView();
      else drawn?.update(false);
    }
    document.body.dataset.ready = "1";
  } catch (error) {
    fill(document.getElementById("state"), h("span", { class: "warn" }, error instanceof TypeError ? "flowrl show has ended." : error.message));
  }
  const busy = page.runs.some((one) => one.indexed < 0.999);
  setTimeout(poll, document.hidden ? 5 * POLL : busy ? POLL / 4 : POLL);
}

addEventListener("hashchange", () => {
  readAddress();
  drawHead();
  drawRuns();
  drawView();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn?.update(true));
poll();
