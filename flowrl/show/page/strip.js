// A row as a strip of tokens, coloured by a number that it has for each of them.
import { ask } from "./ask.js";
import { fill, h, hideCard, showCard, visible } from "./dom.js";
import { number } from "./words.js";
import { page, remember } from "./page.js";

const NAMES = {
  advantages: "Advantage", ratio: "Ratio", gap: "Gap of log-probabilities", entropies: "Entropy", versions: "Version of the weights",
  rollout_logprobs: "Log-probability when sampled", trained_logprobs: "Log-probability when trained", "gap to the reference": "Gap to the reference", values: "Value", token_rewards: "Reward by token",
  response_mask: "Trained or not",
};
const FIRST = ["advantages", "ratio", "gap", "entropies", "versions", "gap to the reference", "rollout_logprobs", "trained_logprobs"];
const CENTRED = { advantages: 0, gap: 0, "gap to the reference": 0, ratio: 1, token_rewards: 0, returns: 0 };
// What a row lacks, by the column that would show it: what it takes to have it.
const LACKING = {
  gap: "This row has no ratio and no gap of log-probabilities: the first step of the update did not compute it (it may teach nothing). actor.logprobs adds them to every row.",
  entropies: "This row has no entropy: the first step of the update did not compute it. actor.entropies adds it to every row.",
};
const HUES = [211, 30, 150, 270, 2, 187, 52, 318];

export function drawStrip(place, row) {
  let strip = row.strip;
  if (!strip.count) {
    fill(place, h("p", { class: "empty" }, "This row has no tokens on record."));
    return;
  }
  const names = [...FIRST.filter((name) => row.columns.includes(name)), ...row.columns.filter((name) => !FIRST.includes(name))];
  let by = names.includes(page.words.by) ? page.words.by : names[0];
  const choice = h("select", { "aria-label": "Colour by", on: { change: () => { by = choice.value; remember({ by }); paint(); } } },
    names.map((name) => h("option", { value: name, selected: name === by }, NAMES[name] ?? name)));
  const scale = h("span", { class: "scale" }), tokens = h("div", { class: "strip" }), pages = h("div", { class: "bar" });
  const lacking = Object.keys(LACKING).filter((name) => !row.columns.includes(name)).map((name) => LACKING[name]);
  fill(place, h("div", { class: "bar" }, names.length ? h("label", {}, "Colour by ", choice) : "", scale), tokens, pages,
    lacking.length ? h("p", {}, h("small", { class: "lacking" }, lacking.join(" "))) : "");

  function paint() {
    const values = strip.columns[by] ?? [];
    const known = values.filter((value) => value !== null);
    const colours = paletteOf(by, known);
    fill(scale, colours.legend);
    fill(tokens, strip.ids.map((id, at) => {
      const text = strip.texts ? strip.texts[at] : String(id);
      const trained = strip.columns.response_mask?.[at];
      const value = values[at];
      const kind = strip.first + at < strip.prompt ? "prompt" : trained === 0 ? "off" : null;
      return h("span", { class: kind, vars: value === null || value === undefined ? {} : { "--shade": colours.of(value) },
        on: { pointerenter: (event) => tell(event, at, text), pointerleave: hideCard } },
        shownText(text), strip.texts ? "" : " ");
    }));
    drawPages();
  }

  function tell(event, at, text) {
    const said = names.map((name) => [NAMES[name] ?? name, strip.columns[name]?.[at]]).filter(([, value]) => value !== null && value !== undefined);
    showCard(event, h("b", {}, strip.texts ? JSON.stringify(text) : `Token ${text}`), h("small", {}, ` number ${strip.ids[at]}, place ${strip.first + at}`),
      h("dl", {}, said.map(([name, value]) => [h("dt", {}, name), h("dd", {}, number(value))])));
  }

  function drawPages() {
    const end = strip.first + strip.ids.length;
    if (strip.first === 0 && end === strip.count) { fill(pages); return; }
    const turn = (first, said) => h("button", { class: "button", type: "button", on: { click: async () => {
      strip = await ask("tokens", { run: page.chosen, n: row.n, from: first });
      paint();
    } } }, said);
    fill(pages, `Tokens ${number(strip.first + 1)} to ${number(end)} of ${number(strip.count)}`,
      strip.first > 0 ? turn(Math.max(0, strip.first - 2000), "Earlier") : "", end < strip.count ? turn(end, "Later") : "");
  }
  paint();
}

function shownText(text) {
  const seen = visible(text).replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5\t");
  return seen === "" ? "\u2205" : seen;
}

function paletteOf(name, known) {
  const low = Math.min(...known), high = Math.max(...known);
  if (!known.length) return { of: () => "none", legend: [h("span", {}, "no numbers here")] };
  if (name === "versions") {
    const all = [...new Set(known)].sort((a, b) => a - b);
    const of = (value) => `hsl(${HUES[all.indexOf(value) % HUES.length]} 70% 50% / 0.28)`;
    return { of, legend: all.slice(0, 8).flatMap((value) => [h("i", { vars: { width: "14px", background: of(value) } }), h("span", {}, number(value))]) };
  }
  const centre = name in CENTRED ? CENTRED[name] : low < 0 && high > 0 ? 0 : null;
  if (centre !== null) {
    const reach = Math.max(Math.abs(low - centre), Math.abs(high - centre)) || 1;
    const of = (value) => `hsl(${value >= centre ? 150 : 2} 62% 45% / ${(0.55 * Math.min(1, Math.abs(value - centre) / reach)).toFixed(3)})`;
    return { of, legend: bar(centre - reach, centre, centre + reach, [of(centre - reach), of(centre), of(centre + reach)]) };
  }
  const of = (value) => `hsl(211 75% 50% / ${(0.06 + 0.5 * (high > low ? (value - low) / (high - low) : 0)).toFixed(3)})`;
  return { of, legend: bar(low, null, high, [of(low), of(high)]) };
}

function bar(low, middle, high, colours) {
  return [h("span", {}, number(low)), h("i", { vars: { background: `linear-gradient(90deg, ${colours.join(", ")})` }, title: middle === null ? null : `${number(middle)} in the middle` }), h("span", {}, number(high))];
}
