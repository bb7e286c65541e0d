// What the run is made of: its record, its plan, what it waits for.
import { ask } from "./ask.js";
import { fill, h } from "./dom.js";
import { bytes, moment, number, percent, seconds } from "./words.js";
import { page } from "./page.js";

export const title = "Run";

const NAMES = {
  script: "Script", arguments: "Arguments", programs: "Programs", parameters: "Parameters", seed: "Seed", runtime: "Runtime", host: "Host", device: "Device", commit: "Commit",
  started: "Started", ended: "Ended", id: "Id", weights_digest: "Digest of the weights", best: "Best checkpoint",
};

export function draw(place) {
  let alive = true, shown = "";
  async function show() {
    let answer, foretold;
    try {
      [answer, foretold] = await Promise.all([ask("about", { run: page.chosen }), ask("forecast", { run: page.chosen })]);
    } catch (error) {
      shown = "";
      if (alive) fill(place, h("p", { class: "warn" }, error.message));
      return;
    }
    const now = JSON.stringify([answer, foretold]);
    if (!alive || now === shown) return;
    shown = now;
    const record = answer.record;
    const rows = Object.entries(NAMES).filter(([name]) => record[name] !== undefined && record[name] !== null)
      .map(([name, said]) => [said, value(name, record[name]) + (name === "commit" && record.dirty ? ", with changes" : "")]);
    fill(place, answer.waits ? waits(answer.waits) : "", answer.note ? h("p", { class: "warn" }, answer.note) : "",
      h("section", {}, h("h2", {}, "What was run"), h("div", { class: "detail" }, h("dl", { class: "fields" }, [["Folder", answer.folder], ...rows].map(([name, text]) => [h("dt", {}, name), h("dd", {}, h("bdi", {}, text))])))),
      record.plan ? h("section", {}, h("h2", {}, "Plan"), h("div", { class: "detail" }, typeof record.plan === "object" ? tree(record.plan) : h("pre", {}, record.plan))) : "",
      foretold.programs.length ? foretold.programs.map(forecast) : h("p", { class: "faint forecast" }, "No forecast: the run was given no plan, or sizes that it needs are not known."),
      record.versions ? h("section", {}, h("h2", {}, "Versions"), h("dl", { class: "tiles" }, Object.entries(record.versions).map(([name, version]) => h("div", {}, h("dt", {}, name), h("dd", {}, version))))) : "");
  }
  show();
  return { update: () => show(), leave() { alive = false; } };
}

const UNITS = { seconds, bytes, share: percent, publishes: number };

function forecast(of) { // what the plan foretold beside what happened
  const said = (line, value) => (value === null ? "–" : UNITS[line.unit](value));
  const times = (line) => (line.foretold && line.measured !== null ? `${number(line.measured / line.foretold)} x` : "");
  return h("section", { class: "forecast" }, h("h2", {}, "The forecast of the plan beside what happened: ", h("bdi", {}, of.program)),
    h("table", {}, h("thead", {}, h("tr", {}, ["", "Forecast", "Measured", "Measured by forecast"].map((text, place) => h("th", { class: place ? "number" : null }, text)))),
      h("tbody", {}, of.lines.map((line) => h("tr", {}, h("td", {}, h("bdi", {}, line.what)), h("td", { class: "number" }, said(line, line.foretold)),
        h("td", { class: "number" }, said(line, line.measured)), h("td", { class: "number" }, times(line)))))),
    h("p", { class: "faint" }, `The forecast is a ${of.source}. `, of.notes.join(". ")));
}

function waits(story) {
  return h("section", {}, h("h2", {}, "How it is"), h("div", { class: "detail" }, h("p", {}, story.state),
    story.waits.length ? h("ol", {}, story.waits.map((wait) => h("li", {}, `${wait.who} waits for ${wait.producer}`, wait.seconds === null ? "" : ` (${number(Math.round(wait.seconds))} s so far)`))) : "",
    story.blame ? h("p", {}, h("b", {}, "To blame: "), story.blame) : "", story.fix ? h("p", { class: "faint" }, story.fix) : ""));
}

function value(name, of) {
  if (name === "started" || name === "ended") return moment(of);
  if (name === "parameters" && Array.isArray(of)) return of.map(plain).filter(Boolean).join("; ");
  if (Array.isArray(of)) return of.map((one) => (typeof one === "object" ? plain(one) : String(one))).filter(Boolean).join(name === "arguments" ? " " : ", ");
  return typeof of === "object" ? plain(of) : String(of);
}

function plain(of) {
  return of === null ? "" : Object.entries(of).map(([name, one]) => `${name} = ${typeof one === "object" ? JSON.stringify(one) : one}`).join(", ");
}

function tree(of) {
  return h("dl", { class: "fields" }, Object.entries(of).map(([name, one]) => [h("dt", {}, h("bdi", {}, name)),
    h("dd", {}, one !== null && typeof one === "object" && !Array.isArray(one) && Object.values(one).some((inner) => inner !== null && typeof inner === "object") ? tree(one) : h("bdi", {}, value("", one) || "–"))]));
}
