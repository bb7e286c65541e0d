// What became of every row, how old the weights were that made it, and what moved.
import { ask } from "./ask.js";
import { fill, h } from "./dom.js";
import { bytes, number, percent } from "./words.js";
import { mainProgram, page, remember, run } from "./page.js";

export const title = "Ledger";

export function draw(place) {
  const programs = h("select", { "aria-label": "Program", on: { change: () => { page.program = programs.value; remember({ program: page.program }); show(); } } });
  const inside = h("div");
  fill(place, h("div", { class: "bar" }, programs), inside);
  let alive = true;

  async function show() {
    const known = (await ask("names", { run: page.chosen })).programs;
    if (!alive) return;
    if (!known.some((one) => one.program === page.program)) page.program = mainProgram(known.map((one) => one.program)) ?? known.reduce((a, b) => (b.lines > a.lines ? b : a), { program: "", lines: -1 }).program;
    fill(programs, known.map((one) => h("option", { value: one.program }, one.program)));
    programs.value = page.program;
    programs.hidden = known.length < 2;
    const answer = await ask("ledger", { run: page.chosen, program: page.program });
    if (!alive) return;
    const last = answer.lines.at(-1);
    if (!last) { fill(inside, h("p", { class: "empty" }, "No step of this program has a ledger yet.")); return; }
    fill(inside, ["rows", "prompts"].filter((what) => last[what]).map((what) => account(what, last[what], last.step)),
      answer.lags.length ? histogram(answer.lags) : "", moved(answer.traffic));
  }
  show();
  return { update: (anew) => { if (anew || run()?.status === "running") show(); }, leave() { alive = false; } };
}

function account(what, counts, step) {
  const dropped = Object.entries(counts.dropped ?? {}).sort((a, b) => b[1] - a[1]);
  const admitted = counts.admitted || 0;
  const parts = [["Trained on", counts.trained ?? 0, "good"], ...dropped.map(([why, count]) => [`Left out: ${why}`, count, "bad"]), ["Under way", counts.live ?? 0, "live"]];
  return h("section", {}, h("h2", {}, `${what === "rows" ? "Rows" : "Prompts"} until step ${number(step)}`),
    h("div", { class: "account" },
      h("div", { class: "whole" }, parts.filter(([, count]) => count > 0).map(([name, count, kind]) => h("i", { class: kind, title: `${name}: ${number(count)}`, vars: { flex: String(count) } }))),
      h("table", {}, h("tbody", {}, h("tr", {}, h("th", {}, "Admitted"), h("td", { class: "number" }, number(admitted)), h("td", { class: "number" }, "100 %")),
        parts.map(([name, count, kind]) => h("tr", {}, h("td", {}, h("i", { class: `dot ${kind}` }), h("bdi", {}, name)), h("td", { class: "number" }, number(count)), h("td", { class: "number" }, admitted ? percent(count / admitted) : "")))))));
}

function histogram(lags) {
  const all = lags.reduce((sum, [, groups]) => sum + groups, 0), most = Math.max(...lags.map(([, groups]) => groups), 1);
  const mean = lags.reduce((sum, [lag, groups]) => sum + lag * groups, 0) / (all || 1);
  return h("section", {}, h("h2", {}, "Lag of what was trained on"),
    h("p", { class: "faint" }, `How many publishes lie between the oldest token of a prompt's rows and the weights that were trained. The mean is ${number(mean)}.`),
    h("div", { class: "histogram" }, lags.slice(0, 60).map(([lag, groups]) => h("div", { title: `lag ${lag}: ${number(groups)} prompts` },
      h("small", {}, percent(groups / (all || 1))), h("i", { vars: { height: `${Math.max(2, (120 * groups) / most)}px` } }), h("span", {}, lag)))));
}

function moved(traffic) {
  if (!traffic.steps) return "";
  return h("section", {}, h("h2", {}, "What moves in an average step"), h("dl", { class: "tiles" },
    [["Read by calls", traffic.read], ["Made by calls", traffic.made], ["Weights published", traffic.weights]].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, bytes(value))))));
}
