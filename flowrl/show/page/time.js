// What ran when: a lane for each pool and rank, bars for calls, what let each begin, and the memory meanwhile.
import { ask } from "./ask.js";
import { debounce, fill, h, hideCard, showCard } from "./dom.js";
import { bytes, number, percent, seconds } from "./words.js";
import { mainProgram, page, remember, run } from "./page.js";
import { drawMemory, listedMemory, MEMORY } from "./memory.js";

export const title = "Time";

const LANE = 46, PART = 22, NAMES = 150, AXIS = 24;
const WHY = {
  rows: (name) => `${name} was over, whose rows it reads`, weights: (name) => `${name} was over, which gives or takes weights`, pool: (name) => `${name} was over, which was in its pool`,
  order: (name) => `${name} was over, which comes first`, program: () => "the program made it",
};
const INKS = ["#3d7dca", "#d9822b", "#2e9e6b", "#8e5bd0", "#c8453b", "#0e97a5", "#a0870b", "#b4239a", "#6b7785", "#8a5a3c"];

export function draw(place) {
  const canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "What ran in each pool over time" });
  const whole = h("button", { class: "button", type: "button", on: { click: () => { follow = true; step.value = ""; links = []; story.hidden = true; remember({ step: "", at: "" }); show(null, null); } } }, "All of it");
  const programs = h("select", { "aria-label": "Program", on: { change: () => { page.program = programs.value; showStep(); } } });
  const step = h("input", { type: "number", min: 0, placeholder: "all", "aria-label": "Step", value: page.words.step ?? "", on: { input: debounce(() => showStep(), 150) } });
  const turn = (by) => h("button", { class: "button", type: "button", "aria-label": by < 0 ? "The step before" : "The step after", on: { click: () => { step.value = Math.max(0, Number(step.value || 0) + by); showStep(); } } }, by < 0 ? "‹" : "›");
  const newest = h("button", { class: "button", type: "button", on: { click: () => look(seen.last - (seen.last - seen.first) / 40, seen.last) } }, "The newest");
  const told = h("span", { class: "faint" }), legend = h("ul", { class: "legend" }), table = h("div", { class: "table" });
  const story = h("div", { class: "detail chain", hidden: true });
  fill(place, h("div", { class: "bar" }, whole, newest, programs, h("label", {}, "Step ", step), turn(-1), turn(1), told), h("div", { class: "stage flat" }, canvas), legend,
    h("p", { class: "faint" }, "Drag to move, turn the wheel to enlarge, or use the arrow keys with + and −. Click on a bar for what it waited for."), story, table);
  let alive = true, follow = !page.words.step, seen = null, hits = [], mine = 0, links = [];

  async function show(from, to, more = {}) {
    const turn = ++mine;
    let answer;
    try {
      answer = await ask("lanes", { run: page.chosen, from, to, ...more });
    } catch (error) {
      if (alive && turn === mine) fill(told, h("span", { class: "warn" }, error.message));
      return;
    }
    if (!alive || turn !== mine) return;
    seen = answer;
    canvas.dataset.bars = answer.bars.filter((bar) => bar.rank < 0).length;
    canvas.dataset.parts = answer.bars.length - canvas.dataset.bars;
    canvas.dataset.shares = answer.shares.length;
    canvas.dataset.memory = Object.keys(answer.memory).length;
    canvas.dataset.lanes = answer.lanes.map((lane) => (lane.rank < 0 ? lane.pool : `rank ${lane.rank}`)).join(", ");
    paint();
    if (answer.programs) {
      fill(programs, answer.programs.map((one) => h("option", { value: one.program }, one.program)));
      programs.hidden = answer.programs.length < 2;
      programs.value = chosenProgram(answer.programs);
    }
    fill(told, answer.lanes.length ? `${seconds(answer.from - answer.first)} to ${seconds(answer.to - answer.first)} of ${seconds(answer.last - answer.first)}` : "");
    fill(legend, answer.nodes.slice(0, 24).map((node) => h("li", {}, h("i", { vars: { background: ink(node) } }), h("bdi", {}, node))));
    if (answer.busiest) fill(table, answer.busiest.length ? [listed(answer.busiest, answer), listedWaits(answer.waits), listedMemory(answer.memory, (place) => INKS[place % INKS.length])] : h("p", { class: "empty" }, "Nothing has run yet."));
  }

  const chosenProgram = (known) => (known.some((one) => one.program === page.program) ? page.program : mainProgram(known.map((one) => one.program)) ?? known[0]?.program ?? "");

  async function showStep() {
    if (step.value === "") { whole.click(); return; }
    follow = false;
    remember({ step: step.value });
    await show(null, null, { step: step.value, program: programs.value || page.program || run()?.program || "" });
  }

  async function tell(bar) { // the calls that let each other begin, up to this one
    const answer = await ask("chain", { run: page.chosen, at: bar.at });
    if (!alive || !seen) return;
    links = answer.chain;
    remember({ at: links.length ? bar.at : "" });
    story.hidden = !links.length;
    fill(story, h("div", { class: "head" }, h("h2", {}, "What it waited for")), h("ol", {}, links.map((one, place) => h("li", {},
      h("button", { class: "link", type: "button", on: { click: () => look(one.start - (one.end - one.start), one.end + (one.end - one.start)) } }, h("bdi", {}, `${one.node}, step ${number(one.step)}`)),
      h("span", {}, ` ran from ${seconds(one.start - seen.first)} to ${seconds(one.end - seen.first)}`, one.kind ? `, and could begin when ${why(one, links[place + 1])}` : "", waited(one))))));
    canvas.dataset.chain = links.length;
    paint();
  }

  const ask_ = debounce((from, to) => show(from, to), 60);
  const wide = () => seen.to - seen.from;
  const ink = (node) => INKS[Math.max(0, seen.nodes.indexOf(node)) % INKS.length];

  function look(from, to) {
    if (!seen || !seen.lanes.length) return;
    const least = 1e-4, span = Math.min(Math.max(to - from, least), seen.last - seen.first || 1);
    from = Math.max(seen.first, Math.min(from, seen.last - span));
    follow = false;
    seen = { ...seen, from, to: from + span };
    paint();
    ask_(from, from + span);
  }

  function paint() {
    const tops = new Map();
    let below = 0;
    for (const lane of seen.lanes) {
      tops.set(`${lane.pool}\n${lane.rank}`, below);
      below += lane.rank < 0 ? LANE : PART;
    }
    const processes = Object.keys(seen.memory), lanesEnd = Math.max(below, LANE), memory = processes.length ? MEMORY : 0;
    const scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth, height = lanesEnd + AXIS + memory;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d"), look = getComputedStyle(document.documentElement);
    const faint = look.getPropertyValue("--faint"), rule = look.getPropertyValue("--rule"), words = look.getPropertyValue("--ink");
    pen.scale(scale, scale);
    pen.clearRect(0, 0, width, height);
    pen.font = "12.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const room = width - NAMES - 10, x = (time) => NAMES + ((time - seen.from) / (seen.to - seen.from)) * room;
    hits = [];
    for (const lane of seen.lanes) {
      const above = tops.get(`${lane.pool}\n${lane.rank}`), high = lane.rank < 0 ? LANE : PART;
      pen.fillStyle = rule;
      pen.fillRect(0, above + high - 0.5, width, 0.5);
      pen.fillStyle = lane.rank < 0 ? words : faint;
      pen.fillText(lane.rank < 0 ? fitted(pen, lane.pool || "the driver", NAMES - 24) : `rank ${lane.rank}`, lane.rank < 0 ? 12 : 26, above + high / 2);
    }
    const top = (bar) => tops.get(`${bar.pool}\n${bar.rank}`) + (bar.rank < 0 ? 7 : 3), tallOf = (bar) => (bar.rank < 0 ? LANE - 14 : PART - 6);
    pen.save();
    pen.beginPath();
    pen.rect(NAMES, 0, room, height);
    pen.clip();
    for (const [left, right, bar] of gaps(x)) { // while nothing ran in the pool
      pen.fillStyle = faint;
      for (let at = left + 2; at < right - 1; at += 5) pen.fillRect(at, top(bar) + tallOf(bar) / 2, 2, 1);
      if (right - left > 6) hits.push([left, right, top(bar), tallOf(bar), { waits: bar, from: bar.start - (right - left) / room * wide() }]);
      const why = bar.producer ? `waits for ${bar.producer.node}` : bar.kind === "program" ? "waits for the program" : "";
      if (why && right - left > 90) pen.fillText(fitted(pen, why, right - left - 14), left + 7, top(bar) + 6);
    }
    for (const bar of seen.bars) {
      const left = x(bar.start), right = Math.max(x(bar.end), left + 1), tall = tallOf(bar);
      pen.fillStyle = ink(bar.node);
      pen.globalAlpha = bar.rank < 0 ? 0.85 : 0.6;
      pen.fillRect(left, top(bar), right - left - (right - left > 3 ? 1 : 0), tall);
      pen.globalAlpha = 1;
      if (bar.ready !== null && x(bar.ready) - left > 1) { // its rows were on their way
        pen.fillStyle = "#ffffff77";
        pen.fillRect(left, top(bar), x(bar.ready) - left, tall);
      }
      hits.push([left, right, top(bar), tall, bar]);
      if (right - left > 46) {
        pen.fillStyle = "#fff";
        pen.fillText(fitted(pen, bar.rank < 0 ? `${bar.node} ${bar.step}` : bar.node, right - left - 10), left + 5, top(bar) + tall / 2);
      }
    }
    links.forEach((one, place) => { // from what was over to what it let begin
      const before = links[place + 1];
      if (!tops.has(`${one.pool}\n${one.rank}`)) return;
      pen.strokeStyle = words;
      pen.lineWidth = 1.5;
      pen.strokeRect(x(one.start), top(one), Math.max(2, x(one.end) - x(one.start)), tallOf(one));
      if (!before || !tops.has(`${before.pool}\n${before.rank}`)) return;
      pen.beginPath();
      pen.moveTo(x(before.end), top(before) + tallOf(before) / 2);
      pen.lineTo(x(one.start), top(one) + tallOf(one) / 2);
      pen.stroke();
    });
    const stacked = new Map();
    for (const share of seen.shares) {
      const key = `${share.pool}\n${share.rank}\n${share.part}`, below = stacked.get(key) ?? 0, part = Math.min(share.share, 1 - below), tall = tallOf(share);
      if (part <= 0) continue;
      const left = x(seen.from + share.part * seen.wide), right = x(seen.from + (share.part + 1) * seen.wide);
      pen.fillStyle = ink(share.node);
      pen.globalAlpha = 0.85;
      pen.fillRect(left, top(share) + tall * (1 - below - part), right - left + 0.3, tall * part);
      pen.globalAlpha = 1;
      stacked.set(key, below + part);
      hits.push([left, right, top(share), tall, share]);
    }
    if (memory) drawMemory(pen, seen.memory, { x, top: lanesEnd, from: NAMES, to: NAMES + room, rule, words, faint, ink: (place) => INKS[place % INKS.length] });
    pen.restore();
    if (memory) {
      pen.fillStyle = words;
      pen.fillText("Memory", 12, lanesEnd + MEMORY / 2);
    }
    pen.fillStyle = faint;
    pen.font = "11.5px system-ui, sans-serif";
    const step = round((seen.to - seen.from) / Math.max(2, room / 110));
    for (let tick = Math.ceil((seen.from - seen.first) / step) * step; seen.first + tick <= seen.to && step > 0; tick += step) {
      const at = x(seen.first + tick), text = seen.last - seen.first < 120 ? seconds(Number(tick.toPrecision(12))) : clock(tick, step);
      pen.fillRect(at, height - AXIS, 0.7, 5);
      if (at + 3 + pen.measureText(text).width < width - 4) pen.fillText(text, at + 3, height - AXIS / 2 + 2);
    }
  }

  function* gaps(x) { // between two calls of a pool: from where to where, and the call that came then
    const ends = new Map();
    for (const bar of seen.bars.filter((one) => one.rank < 0 && one.pool).sort((a, b) => a.start - b.start)) {
      const before = ends.get(bar.pool);
      if (before !== undefined && x(bar.start) - x(before) > 2) yield [x(before), x(bar.start), bar];
      ends.set(bar.pool, Math.max(before ?? -Infinity, bar.end));
    }
  }

  const before = (bar) => { // in runs that say nothing of it, what ended last before it
    if (bar.kind) return why(bar, bar.producer);
    const last = seen.bars.reduce((found, one) => (one !== bar && one.rank < 0 && one.end <= bar.start + 1e-6 && one.end > (found?.end ?? -1) ? one : found), null);
    return last ? `${last.node}, step ${number(last.step)}, ended last before it` : "nothing on this screen";
  };
  const slowest = (bar) => Math.max(0, ...seen.bars.filter((one) => one.at === bar.at && one.rank >= 0).map((one) => one.end)) - bar.end;
  const inside = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const hitAt = (left, top) => hits.findLast(([from, to, above, tall]) => left >= from && left <= Math.max(to, from + 2) && top >= above && top <= above + tall);
  const timeAt = (left) => seen.from + ((left - NAMES) / (canvas.clientWidth - NAMES - 10)) * wide();
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { if (seen) { held = { at: event.clientX, from: seen.from, to: seen.to }; canvas.setPointerCapture(event.pointerId); } });
  canvas.addEventListener("pointerup", (event) => {
    const still = held && Math.abs(event.clientX - held.at) < 4, hit = still && hitAt(...inside(event));
    held = null;
    const bar = hit && (hit[4].waits ?? hit[4]);
    if (bar && bar.at !== undefined) tell(bar);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!seen) return;
    if (held) {
      const moved = ((held.at - event.clientX) / (canvas.clientWidth - NAMES - 10)) * (held.to - held.from);
      if (moved) look(held.from + moved, held.to + moved);
      return;
    }
    const [left, top] = inside(event);
    const hit = hitAt(left, top);
    if (!hit) { hideCard(); return; }
    const bar = hit[4];
    if (bar.waits) {
      showCard(event, h("b", {}, "Nothing ran here"), h("dl", {}, pair("For", seconds(bar.waits.start - bar.from)), pair("Then came", `${bar.waits.node}, step ${number(bar.waits.step)}`), pair("It could begin when", before(bar.waits))));
      return;
    }
    if (bar.rank >= 0 && !("share" in bar)) {
      showCard(event, h("b", {}, h("bdi", {}, bar.node)), h("dl", {}, pair("Rank", bar.rank), pair("Step", number(bar.step)), pair("Begins", seconds(bar.start - seen.first)), pair("Brings its rows", seconds(bar.ready - bar.start)),
        pair("Is at them", seconds(bar.end - bar.ready)), pair("Then waits for other ranks", seconds(slowest(bar)))));
      return;
    }
    showCard(event, h("b", {}, h("bdi", {}, bar.node)), "share" in bar ? h("dl", {}, pair("Pool", bar.pool), pair("Calls here", number(bar.count)), pair("Part of the time", percent(bar.share)))
      : h("dl", {}, pair("Program", bar.program), pair("Step", number(bar.step)), pair("Pool", bar.pool), pair("Begins", seconds(bar.start - seen.first)), pair("Takes", seconds(bar.end - bar.start)),
        pair("Could begin when", before(bar)), bar.issued === null ? "" : pair("Since the program made it", seconds(Math.max(0, bar.start - bar.issued))), pair("Rows", number(bar.rows)), bar.tokens ? pair("Tokens", number(bar.tokens)) : ""));
  });
  canvas.addEventListener("pointerleave", hideCard);
  canvas.addEventListener("wheel", (event) => {
    if (!seen) return;
    event.preventDefault();
    const at = timeAt(inside(event)[0]), by = Math.exp(event.deltaY * 0.0016);
    look(at - (at - seen.from) * by, at + (seen.to - at) * by);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.3, 0.3] };
    if (!(event.key in moves) || !seen) return;
    event.preventDefault();
    const [from, to] = moves[event.key];
    look(seen.from + from * wide(), seen.to + to * wide());
  });

  const resized = debounce(() => seen && paint(), 100);
  addEventListener("resize", resized);
  (step.value === "" ? show(null, null) : showStep()).then(() => page.words.at && tell({ at: page.words.at }));
  return {
    update(anew) { if (follow && (anew || run()?.status === "running" || !seen?.lanes.length)) show(null, null); else if (anew && seen) paint(); },
    leave() { alive = false; removeEventListener("resize", resized); },
  };
}

function listed(calls, answer) {
  const whole = answer.last - answer.first || 1;
  const rows = calls.slice(0, 200).map((call) => h("tr", {}, h("td", {}, h("bdi", {}, call.node)), h("td", {}, h("bdi", {}, call.program)), h("td", {}, h("bdi", {}, call.pool)),
    h("td", { class: "number" }, number(call.calls)), h("td", { class: "number" }, seconds(call.seconds / Math.max(1, call.calls))), h("td", { class: "number" }, seconds(call.longest)),
    h("td", { class: "number" }, percent(call.seconds / whole)), h("td", { class: "number" }, call.tokens ? number(Math.round(call.tokens / Math.max(call.seconds, 1e-9))) : "")));
  return h("table", {}, h("thead", {}, h("tr", {}, ["Call", "Program", "Pool", "Calls", "One call", "The longest", "Of all the time", "Tokens a second"].map((text) => h("th", { class: NUMBERS.has(text) ? "number" : null }, text)))), h("tbody", {}, rows));
}

function listedWaits(waits) {
  if (!waits.length) return h("p", { class: "faint" }, "No pool has waited between two calls.");
  const rows = waits.map((wait) => h("tr", {}, h("td", {}, h("bdi", {}, wait.pool)), h("td", {}, h("bdi", {}, wait.node)), h("td", {}, h("bdi", {}, wait.producer ?? (wait.kind === "program" ? "the program" : "–"))), h("td", {}, FOR[wait.kind] ?? ""),
    h("td", { class: "number" }, number(wait.calls)), h("td", { class: "number" }, seconds(wait.seconds)), h("td", { class: "number" }, seconds(wait.longest))));
  return h("section", { class: "waits" }, h("h2", {}, "What pools waited for"), h("table", {}, h("thead", {}, h("tr", {}, ["Pool", "Before", "Waited for", "Because of", "Times", "In all", "The longest"].map((text) => h("th", { class: ["Times", "In all", "The longest"].includes(text) ? "number" : null }, text)))), h("tbody", {}, rows)));
}

const FOR = { rows: "rows that it reads", weights: "weights", pool: "the pool", order: "the order of calls", program: "the line was not reached" };
const named = (bar) => (bar ? `${bar.node} of step ${number(bar.step)}` : "a call before");
const why = (bar, producer) => (WHY[bar.kind] ?? ((name) => `${name} was over`))(named(producer));
const waited = (bar) => (bar.due !== null && bar.start - bar.due > 0.001 ? `; its thread came to it ${seconds(bar.start - bar.due)} later` : "");

const NUMBERS = new Set(["Calls", "One call", "The longest", "Of all the time", "Tokens a second"]);
const pair = (name, value) => [h("dt", {}, name), h("dd", {}, value)];

function round(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  const sixties = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400].find((some) => some >= step);
  if (step > 5 && sixties) return sixties;
  return [1, 2, 5, 10].map((part) => part * power).find((part) => part >= step) ?? step;
}

function clock(time, step) { // 1:02:30
  const whole = Math.floor(time), two = (part) => String(part).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(whole % 60)}${step < 1 ? (time - whole).toFixed(3).slice(1) : ""}`;
}

function fitted(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text.length > 1 && pen.measureText(`${text}…`).width > room) text = text.slice(0, -1 - Math.floor(text.length / 12));
  return `${text}…`;
}
