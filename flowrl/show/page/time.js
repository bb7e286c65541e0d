// What ran when: a lane for each pool, bars for calls, and how long each call took.
import { ask } from "./ask.js";
import { debounce, fill, h, hideCard, showCard } from "./dom.js";
import { number, percent, plural, seconds } from "./words.js";
import { page, run } from "./page.js";

export const title = "Time";

const LANE = 46, NAMES = 150, AXIS = 24;
const INKS = ["#3d7dca", "#d9822b", "#2e9e6b", "#8e5bd0", "#c8453b", "#0e97a5", "#a0870b", "#b4239a", "#6b7785", "#8a5a3c"];

export function draw(place) {
  const canvas = h("canvas", { class: "lanes", tabindex: "0", role: "img", "aria-label": "What ran in each pool over time" });
  const whole = h("button", { class: "button", type: "button", on: { click: () => { follow = true; show(null, null); } } }, "All of it");
  const newest = h("button", { class: "button", type: "button", on: { click: () => look(seen.last - (seen.last - seen.first) / 40, seen.last) } }, "The newest");
  const told = h("span", { class: "faint" }), legend = h("ul", { class: "legend" }), table = h("div", { class: "table" });
  fill(place, h("div", { class: "bar" }, whole, newest, told), h("div", { class: "stage flat" }, canvas), legend,
    h("p", { class: "faint" }, "Drag to move, turn the wheel to enlarge, or use the arrow keys with + and −."), table);
  let alive = true, follow = true, seen = null, hits = [], mine = 0;

  async function show(from, to) {
    const turn = ++mine;
    const answer = await ask("lanes", { run: page.chosen, from, to });
    if (!alive || turn !== mine) return;
    seen = answer;
    canvas.dataset.bars = answer.bars.length;
    canvas.dataset.shares = answer.shares.length;
    paint();
    fill(told, answer.pools.length ? `${seconds(answer.from - answer.first)} to ${seconds(answer.to - answer.first)} of ${seconds(answer.last - answer.first)}` : "");
    fill(legend, answer.nodes.slice(0, 24).map((node) => h("li", {}, h("i", { vars: { background: ink(node) } }), h("bdi", {}, node))));
    if (answer.busiest) fill(table, answer.busiest.length ? listed(answer.busiest, answer) : h("p", { class: "empty" }, "Nothing has run yet."));
  }

  const ask_ = debounce((from, to) => show(from, to), 60);
  const wide = () => seen.to - seen.from;
  const ink = (node) => INKS[Math.max(0, seen.nodes.indexOf(node)) % INKS.length];

  function look(from, to) {
    if (!seen || !seen.pools.length) return;
    const least = 1e-4, span = Math.min(Math.max(to - from, least), seen.last - seen.first || 1);
    from = Math.max(seen.first, Math.min(from, seen.last - span));
    follow = false;
    seen = { ...seen, from, to: from + span };
    paint();
    ask_(from, from + span);
  }

  function paint() {
    const scale = devicePixelRatio || 1, width = canvas.parentElement.clientWidth, height = Math.max(1, seen.pools.length) * LANE + AXIS;
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
    seen.pools.forEach((pool, place) => {
      pen.fillStyle = rule;
      pen.fillRect(0, (place + 1) * LANE - 0.5, width, 0.5);
      pen.fillStyle = words;
      pen.fillText(fitted(pen, pool || "the driver", NAMES - 24), 12, place * LANE + LANE / 2);
    });
    const top = (pool) => seen.pools.indexOf(pool) * LANE + 7, tall = LANE - 14;
    pen.save();
    pen.beginPath();
    pen.rect(NAMES, 0, room, height);
    pen.clip();
    for (const bar of seen.bars) {
      const left = x(bar.start), right = Math.max(x(bar.end), left + 1);
      pen.fillStyle = ink(bar.node);
      pen.globalAlpha = 0.85;
      pen.fillRect(left, top(bar.pool), right - left - (right - left > 3 ? 1 : 0), tall);
      pen.globalAlpha = 1;
      hits.push([left, right, top(bar.pool), bar]);
      if (right - left > 46) {
        pen.fillStyle = "#fff";
        pen.fillText(fitted(pen, `${bar.node} ${bar.step}`, right - left - 10), left + 5, top(bar.pool) + tall / 2);
      }
    }
    const stacked = new Map();
    for (const share of seen.shares) {
      const key = `${share.pool}\n${share.part}`, below = stacked.get(key) ?? 0, part = Math.min(share.share, 1 - below);
      if (part <= 0) continue;
      const left = x(seen.from + share.part * seen.wide), right = x(seen.from + (share.part + 1) * seen.wide);
      pen.fillStyle = ink(share.node);
      pen.globalAlpha = 0.85;
      pen.fillRect(left, top(share.pool) + tall * (1 - below - part), right - left + 0.3, tall * part);
      pen.globalAlpha = 1;
      stacked.set(key, below + part);
      hits.push([left, right, top(share.pool), share]);
    }
    pen.restore();
    pen.fillStyle = faint;
    pen.font = "11.5px system-ui, sans-serif";
    const step = round((seen.to - seen.from) / Math.max(2, room / 110));
    for (let tick = Math.ceil((seen.from - seen.first) / step) * step; seen.first + tick <= seen.to && step > 0; tick += step) {
      const at = x(seen.first + tick), text = seen.last - seen.first < 120 ? seconds(Number(tick.toPrecision(12))) : clock(tick, step);
      pen.fillRect(at, height - AXIS, 0.7, 5);
      if (at + 3 + pen.measureText(text).width < width - 4) pen.fillText(text, at + 3, height - AXIS / 2 + 2);
    }
  }

  const before = (bar) => { // what ended last before it: that is taken to be what it waited for
    const last = seen.bars.reduce((found, one) => (one !== bar && one.end <= bar.start + 1e-6 && one.end > (found?.end ?? -1) ? one : found), null);
    return last ? `${last.node}, step ${number(last.step)}` : "nothing on this screen";
  };
  const inside = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const timeAt = (left) => seen.from + ((left - NAMES) / (canvas.clientWidth - NAMES - 10)) * wide();
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { if (seen) { held = { at: event.clientX, from: seen.from, to: seen.to }; canvas.setPointerCapture(event.pointerId); } });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!seen) return;
    if (held) {
      const moved = ((held.at - event.clientX) / (canvas.clientWidth - NAMES - 10)) * (held.to - held.from);
      if (moved) look(held.from + moved, held.to + moved);
      return;
    }
    const [left, top] = inside(event);
    const hit = hits.findLast(([from, to, above]) => left >= from && left <= Math.max(to, from + 2) && top >= above && top <= above + LANE - 14);
    if (!hit) { hideCard(); return; }
    const bar = hit[3];
    showCard(event, h("b", {}, h("bdi", {}, bar.node)), "share" in bar ? h("dl", {}, pair("Pool", bar.pool), pair("Calls here", number(bar.count)), pair("Part of the time", percent(bar.share)))
      : h("dl", {}, pair("Program", bar.program), pair("Step", number(bar.step)), pair("Pool", bar.pool), pair("Begins", seconds(bar.start - seen.first)), pair("Takes", seconds(bar.end - bar.start)),
        pair("Began after", before(bar)), pair("Rows", number(bar.rows)), bar.tokens ? pair("Tokens", number(bar.tokens)) : ""));
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
  show(null, null);
  return {
    update(anew) { if (follow && (anew || run()?.status === "running" || !seen?.pools.length)) show(null, null); else if (anew && seen) paint(); },
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
