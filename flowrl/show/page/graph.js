// The program's graph with what its run has measured.
import { ask } from "./ask.js";
import { fill, h } from "./dom.js";
import { bytes, percent, seconds } from "./words.js";
import { mainProgram, page, remember, run } from "./page.js";

export const title = "Graph";

export function draw(place) {
  const programs = h("select", { "aria-label": "Program", on: { change: () => { page.program = programs.value; remember({ program: page.program }); show(); } } });
  const basis = h("span", { class: "faint" }), stage = h("div", { class: "stage" }), facts = h("div", { class: "detail" }), table = h("div", { class: "table" });
  fill(place, h("div", { class: "bar" }, programs, basis), h("div", { class: "graphs" }, stage, facts), table);
  let alive = true, picture = null, chosen = page.words.node ?? "", nodes = [], waiting;

  async function show() {
    clearTimeout(waiting);
    let answer;
    try {
      answer = await ask("graph", { run: page.chosen, program: page.program ?? "" });
    } catch (error) {
      fill(stage, h("p", { class: "warn" }, error.message));
      return;
    }
    if (!alive) return;
    if (answer.programs.length && !answer.programs.includes(page.program)) {
      page.program = mainProgram(answer.programs) ?? answer.programs[0];
      return show();
    }
    fill(programs, answer.programs.map((name) => h("option", { value: name }, name)));
    programs.value = page.program;
    programs.hidden = answer.programs.length < 2;
    if (answer.picture === null) {
      fill(stage, h("p", { class: "empty" }, "The graph is being drawn."));
      waiting = setTimeout(show, 200);
      return;
    }
    nodes = answer.nodes;
    fill(basis, answer.basis);
    if (!answer.picture) fill(stage, h("p", { class: "empty" }, answer.problem));
    else if (answer.picture !== picture) put(answer.picture);
    picture = answer.picture;
    fill(table, nodes.length ? listed(answer.lags) : "");
    choose(chosen);
  }

  function put(text) { // the server's own drawing: shapes and texts, and nothing else is taken over
    const drawn = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
    for (const element of [drawn, ...drawn.querySelectorAll("*")]) {
      if (!SHAPES.has(element.localName)) element.remove();
      for (const { name } of [...element.attributes]) if (/^on|href$/i.test(name)) element.removeAttribute(name);
    }
    stage.replaceChildren(document.importNode(drawn, true));
    for (const node of stage.querySelectorAll(".node")) {
      node.setAttribute("tabindex", "0");
      node.setAttribute("role", "button");
      node.addEventListener("click", () => choose(node.dataset.id));
      node.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(node.dataset.id); });
    }
  }

  function choose(id) {
    const node = nodes.find((one) => one.id === id) ?? nodes.reduce((a, b) => ((b.seconds ?? -1) > (a?.seconds ?? -1) ? b : a), null);
    chosen = id;
    if (id) remember({ node: id });
    stage.querySelectorAll(".node").forEach((one) => one.classList.toggle("chosen", one.dataset.id === node?.id));
    if (!node) { fill(facts, h("p", { class: "empty" }, "What a call has taken is shown here.")); return; }
    const rows = [
      ["One call takes", node.seconds === null ? null : seconds(node.seconds)], ["Share of its pool's time", node.share === null ? null : percent(node.share)],
      ["Comes in, in a step", node.read ? bytes(node.read) : null], ["Goes out, in a step", node.made ? bytes(node.made) : null],
      ["Weights", versions(node) || null], ["Pool", [node.pool, node.mesh].filter(Boolean).join(", ") || null], ["Layout", node.layout || null],
      ["Reads", node.reads.join(", ") || null], ["Adds", node.adds.join(", ") || null],
      ...Object.entries(node.settings), ["Written at", node.at || null],
    ].filter(([, value]) => value);
    fill(facts, h("div", { class: "head" }, h("h2", {}, h("bdi", {}, node.id))), node.source ? h("pre", { class: "source" }, node.source) : "",
      h("dl", { class: "fields" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, h("bdi", {}, value))])));
  }

  function listed(lags) {
    const most = lags.length ? ` Rows were trained on with a lag of ${lags.map(([lag]) => lag).join(", ")}.` : "";
    const rows = nodes.map((node) => h("tr", {}, h("td", {}, h("button", { class: "link", type: "button", on: { click: () => choose(node.id) } }, node.id)),
      h("td", { class: "number" }, node.seconds === null ? "" : seconds(node.seconds)), h("td", { class: "number" }, node.share === null ? "" : percent(node.share)),
      h("td", { class: "number" }, node.read ? bytes(node.read) : ""), h("td", { class: "number" }, node.made ? bytes(node.made) : ""), h("td", {}, versions(node)), h("td", {}, node.pool)));
    return [h("table", {}, h("thead", {}, h("tr", {}, ["Call", "One call", "Of its pool", "Comes in", "Goes out", "Weights", "Pool"].map((text) => h("th", { class: NUMBERS.has(text) ? "number" : null }, text)))), h("tbody", {}, rows)),
      most ? h("p", { class: "faint" }, most) : ""];
  }

  show();
  return { update: () => { if (run()?.status === "running" || !picture) show(); }, leave() { alive = false; clearTimeout(waiting); } };
}

const SHAPES = new Set(["svg", "g", "title", "desc", "rect", "path", "text", "tspan", "line", "polyline", "polygon", "circle", "ellipse"]);
const NUMBERS = new Set(["One call", "Of its pool", "Comes in", "Goes out"]);
const versions = (node) => Object.entries(node.versions).map(([worker, all]) => `${worker} version ${all.join(", ")}`).join("; ");
