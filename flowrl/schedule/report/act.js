// What is seen and marked, and what pointer, keys and buttons do about it.

// -- what is seen -----------------------------------------------------------------------------------------------
let from = 0, to = total, width = 800, ratio = 1;
let over = -1, cursor = -1, chosen = null, lit = null, hint = null, pulled = null, asked = null;
let colours = {};
const x = (time) => ((time - from) / (to - from)) * width;
const time = (px) => from + (px / width) * (to - from);

function look(start, end, wanted = null) {
  asked = wanted;
  const span = clamp(end - start, narrowest, total);
  const mid = (start + end) / 2;
  from = clamp(mid - span / 2, 0, total - span);
  to = from + span;
  told();
  later();
}

function zoom(factor, at = (from + to) / 2) {
  look(at - (at - from) / factor, at + (to - at) / factor);
}

function pan(share) {
  const by = clamp((to - from) * share, -from, total - to);
  look(from + by, to + by);
}

function showSteps(least, most) {
  const within = numbers.filter((n) => n >= least && n <= most).map((n) => steps.get(n));
  if (!within.length) return;
  const start = Math.min(...within.map((s) => s.first)), end = Math.max(...within.map((s) => s.last));
  const edge = (end - start) * 0.02;
  look(start - edge, end + edge, [least, most]);
}

function go(by) { // to the next step or the one before
  if (!numbers.length) return;
  const middle = (from + to) / 2;
  let at = numbers.indexOf(chosen);
  if (at < 0) at = Math.max(0, numbers.findLastIndex((n) => steps.get(n).first <= middle)) - by;
  choose(numbers[clamp(at + by, 0, numbers.length - 1)]);
  const { first, last } = steps.get(chosen);
  const span = Math.max(to - from, (last - first) * 1.1), mid = (first + last) / 2;
  if (first < from || last > to) look(mid - span / 2, mid + span / 2);
}

function told() {
  const within = numbers.filter((n) => steps.get(n).first < to && steps.get(n).last > from);
  const fine = (to - from) / 100;
  const range = `${moment(from, fine)} to ${moment(to, fine)}`;
  const marked = chosen === null ? "" : `step ${chosen} takes ${duration(steps.get(chosen).last - steps.get(chosen).first)} · `;
  seen.textContent = count || makespan ? marked + range : "";
  const [least, most] = asked || [within[0], within[within.length - 1]];
  for (const [id, value] of [["from", least], ["to", most]]) {
    const field = document.getElementById(id);
    if (document.activeElement !== field) field.value = value === undefined ? "" : value;
  }
}

// -- bars under the pointer, and what they waited for -------------------------------------------------------------
function hit(px, py) {
  const lane = lanes.find((l) => py >= l.top && py < l.top + l.whole);
  if (!lane) return -1;
  const row = Math.floor((py - lane.first + 1) / (lane.row + 2));
  const items = lane.rows[row];
  if (!items || !items.length) return -1;
  const near = firstOf(items, time(px), bars.start);
  let best = -1, least = 3.5; // dots beside a bar that still mean it
  for (let k = Math.max(0, near - 2); k <= Math.min(items.length - 1, near + 1); k++) {
    const left = x(bars.start[items[k]]), right = x(bars.end[items[k]]);
    const away = px < left ? left - px : px > right ? px - right : 0;
    if (away < least) [best, least] = [items[k], away];
  }
  return best;
}

function causeOf(i) { // the bar that ended last, of those that it waited for; -1 where there is none
  const items = titled.get(reasons[bars.because[i]].split("#")[0]);
  if (!items) return -1;
  const at = firstOf(items, bars.start[i] + slack * 2, bars.end) - 1;
  return at >= 0 && items[at] !== i ? items[at] : -1;
}

function element(tag, text) {
  const made = document.createElement(tag);
  made.textContent = text;
  return made;
}

function list(pairs) {
  const made = document.createElement("dl");
  for (const [name, said] of pairs) made.append(element("dt", name), element("dd", said));
  return made;
}

function about(i) {
  const reason = reasons[bars.because[i]], idle = before[i] > slack ? `, the pool idle for ${duration(before[i])}` : "";
  const node = bars.node[i];
  return [
    ["step", stepName(bars.step[i])],
    ...(pieces[node] > 1 ? [["piece", `${bars.piece[i] + 1} of ${pieces[node]}`]] : []),
    ["pool", pools[bars.lane[i]].name],
    ["from", exact(bars.start[i])],
    ["to", exact(bars.end[i])],
    ["takes", duration(bars.end[i] - bars.start[i])],
    ...(reason || idle ? [["waited for", (reason || "nothing") + idle]] : []),
  ];
}

function showCard(heading, pairs, place) {
  card.replaceChildren(element("h2", heading), list(pairs));
  card.hidden = false;
  const { offsetWidth: wide, offsetHeight: high } = card;
  let left = place.x + 16, top = place.y + 18;
  if (left + wide > innerWidth - 8) left = place.x - 16 - wide;
  if (top + high > innerHeight - 8) top = place.y - 18 - high;
  card.style.left = `${clamp(left, 8, innerWidth - wide - 8)}px`;
  card.style.top = `${clamp(top, 8, innerHeight - high - 8)}px`;
}

function place(i) { // the middle of what is seen of a bar, on the screen
  const { left, right, top, height } = box(i), area = canvas.getBoundingClientRect();
  return { x: area.left + (clamp(left, 0, width) + clamp(right, 0, width)) / 2, y: area.top + top + height / 2 };
}

function hover(i, at) {
  over = i;
  if (i >= 0) showCard(nodes[bars.node[i]].id, about(i), at || place(i));
  else card.hidden = true;
  view.classList.toggle("over", i >= 0);
  later();
}

function hoverMemory(px, py, at) { // true where the pointer is on a curve
  const lane = lanes.find((l) => l.memory && py >= l.top + l.whole - l.memory && py < l.top + l.whole);
  if (!lane) return false;
  const now = lane.pool.memory.findLast(([t]) => t <= time(px));
  if (!now) return false;
  showCard(`memory of ${lane.pool.name}`, [["at", exact(time(px))], ["on a device", volume(now[1])]], at);
  return true;
}

function choose(step) {
  chosen = steps.has(step) ? step : null;
  view.dataset.step = chosen === null ? "" : chosen;
  told();
  later();
}

function light(node) { // show the bars of one node
  lit = node;
  later();
}

// -- pointer --------------------------------------------------------------------------------------------------------
const offset = (event) => event.clientX - canvas.getBoundingClientRect().left;

canvas.addEventListener("wheel", (event) => {
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    event.preventDefault();
    pan((event.deltaX || event.deltaY) / width);
    return;
  }
  if (event.deltaY > 0 && to - from >= total * 0.9999) return; // nothing left to zoom out: the page scrolls
  event.preventDefault();
  zoom(Math.exp(-clamp(event.deltaY, -240, 240) / 320), time(offset(event)));
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  const px = offset(event);
  pulled = { kind: event.shiftKey ? "choose" : "move", x: px, now: px, from, to, moved: false };
});
overview.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  const at = (offset(event) / width) * total;
  if (at < from || at > to) look(at - (to - from) / 2, at + (to - from) / 2);
  pulled = { kind: "strip", x: offset(event), now: 0, from, to, moved: false };
});
addEventListener("pointermove", (event) => {
  if (!pulled) return;
  const px = offset(event), by = px - pulled.x;
  if (!pulled.moved && Math.abs(by) < 3) return;
  pulled.moved = true;
  pulled.now = px;
  hover(-1);
  if (pulled.kind === "move") {
    view.classList.add("moving");
    const shift = -(by / width) * (pulled.to - pulled.from);
    look(pulled.from + shift, pulled.to + shift);
  } else if (pulled.kind === "strip") {
    const shift = (by / width) * total;
    look(pulled.from + shift, pulled.to + shift);
  } else later();
});
addEventListener("pointerup", (event) => {
  if (!pulled) return;
  const { kind, moved, x: begin } = pulled, px = offset(event);
  pulled = null;
  view.classList.remove("moving");
  if (kind === "choose" && moved) look(time(Math.min(begin, px)), time(Math.max(begin, px)));
  else if (kind !== "strip" && !moved) click(event);
  later();
});
addEventListener("pointercancel", () => { pulled = null; });

function click(event) {
  const area = canvas.getBoundingClientRect(), py = event.clientY - area.top;
  const i = hit(event.clientX - area.left, py);
  if (py < AXIS / 2) { // a flag of a step
    const at = time(event.clientX - area.left);
    const step = numbers.findLast((n) => steps.get(n).first <= at);
    choose(step === chosen ? null : step);
  } else if (i >= 0) {
    cursor = i;
    choose(bars.step[i] === chosen ? null : bars.step[i]);
  } else {
    cursor = -1;
    choose(null);
  }
}

canvas.addEventListener("pointermove", (event) => {
  if (pulled && pulled.moved) return;
  const area = canvas.getBoundingClientRect();
  const px = event.clientX - area.left, py = event.clientY - area.top, at = { x: event.clientX, y: event.clientY };
  const i = hit(px, py);
  if (i >= 0 || over >= 0 || !card.hidden) hover(i, at);
  if (i < 0) hoverMemory(px, py, at);
});
canvas.addEventListener("pointerleave", () => hover(-1));

// -- keys, buttons ------------------------------------------------------------------------------------------------
function walk(by) { // along the lane
  if (!count) return;
  if (cursor < 0) return set(firstSeen());
  const { items } = lanes[bars.lane[cursor]];
  set(items[clamp(items.indexOf(cursor) + by, 0, items.length - 1)]);
}

function firstSeen() {
  for (const { items } of lanes) {
    const k = firstOf(items, from, bars.start);
    if (k < items.length && bars.start[items[k]] <= to) return items[k];
  }
  return lanes.find((l) => l.items.length).items[0];
}

function climb(by) { // to the bar of the next lane that begins closest
  if (cursor < 0) return walk(0);
  for (let n = bars.lane[cursor] + by; n >= 0 && n < lanes.length; n += by) {
    const { items } = lanes[n];
    if (!items.length) continue;
    const k = firstOf(items, bars.start[cursor], bars.start), late = items[Math.min(k, items.length - 1)], early = items[Math.max(k - 1, 0)];
    const away = (i) => Math.abs(bars.start[i] - bars.start[cursor]);
    return set(away(early) < away(late) ? early : late);
  }
}

function set(i) { // the cursor, in view
  cursor = i;
  const span = to - from, start = bars.start[i], end = bars.end[i];
  if (start < from || end > to) {
    const at = end - start > span ? start : (start + end) / 2 - span / 2;
    look(at, at + span);
  }
  hover(i);
  over = -1;
}

const keys = {
  ArrowRight: (event) => (event.shiftKey ? pan(0.2) : walk(1)),
  ArrowLeft: (event) => (event.shiftKey ? pan(-0.2) : walk(-1)),
  ArrowDown: () => climb(1),
  ArrowUp: () => climb(-1),
  Enter: () => cursor >= 0 && choose(bars.step[cursor] === chosen ? null : bars.step[cursor]),
  Escape: leave,
  "+": () => zoom(1.5),
  "=": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
  0: () => look(0, total),
  PageDown: () => go(1),
  PageUp: () => go(-1),
};
keys[" "] = keys.Enter;
view.addEventListener("keydown", (event) => {
  const act = keys[event.key];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act(event);
});
view.addEventListener("blur", () => hover(-1));

function leave() {
  cursor = -1;
  hover(-1);
  choose(null);
  press(null);
}

const doing = { fit: () => look(0, total), in: () => zoom(1.5), out: () => zoom(1 / 1.5), back: () => go(-1), on: () => go(1) };
for (const button of all("[data-do]")) button.addEventListener("click", doing[button.dataset.do]);
document.getElementById("range").addEventListener("submit", (event) => {
  event.preventDefault();
  const [least, most] = ["from", "to"].map((id) => Number(document.getElementById(id).value));
  showSteps(Math.min(least, most), Math.max(least, most));
});

function press(node) { // keep the bars of one node shown, or of all
  hint = node;
  for (const button of all("[data-node]")) button.setAttribute("aria-pressed", String(Number(button.dataset.node) === node));
  light(node);
}
for (const button of all("[data-node]")) {
  const node = Number(button.dataset.node);
  button.addEventListener("pointerenter", () => light(node));
  button.addEventListener("pointerleave", () => light(hint));
  button.addEventListener("click", () => press(hint === node ? null : node));
}

// -- begin ----------------------------------------------------------------------------------------------------------
for (const lane of lanes) {
  const made = document.createElement("div"), share = document.createElement("span"), busy = document.createElement("i");
  made.style.top = `${34 + 1 + lane.top}px`;
  made.style.height = `${lane.whole}px`;
  const { name, describes } = lane.pool;
  made.title = `${name}${describes ? `\n${describes}` : ""}\nbusy ${(lane.pool.busy * 100).toFixed(1)} %`;
  share.className = "share";
  busy.className = "busy";
  busy.style.width = `${clamp(lane.pool.busy, 0, 1) * 100}%`;
  share.append(busy);
  const head = document.createElement("p");
  head.append(element("b", name), element("span", `${(lane.pool.busy * 100).toFixed(1)} %`));
  made.append(head);
  if (!tight) made.append(element("small", describes || "\u00a0"), share);
  if (lane.memory) {
    const { memory, capacity } = lane.pool, peak = memory.reduce((most, [, size]) => Math.max(most, size), 0);
    const said = element("small", `peak ${volume(peak)}${capacity ? ` of ${volume(capacity)}` : ""}`);
    said.className = "memory";
    said.title = "Memory on each device";
    made.append(said);
  }
  names.append(made);
}
canvas.style.height = `${bottom}px`;
overview.style.height = "34px";
const measure = () => {
  width = Math.max(view.clientWidth, 50);
  later();
};
new ResizeObserver(measure).observe(view);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  theme();
  later();
});
theme();
width = Math.max(view.clientWidth, 50);
if (numbers.length > 12) showSteps(numbers[0], numbers[7]);
else look(0, total);
draw();

// What tests and the console may use.
window.gantt = {
  lanes: lanes.length, bars: count, rows: pools.map((p) => p.rows), look, showSteps, choose, hover, hit, place, causeOf, draw, duration, moment, exact,
  step: () => chosen, node: () => lit, seen: () => [from, to], drawn: () => drawn, at: (i) => nodes[bars.node[i]].id,
};
Object.assign(document.body.dataset, { ready: "1", lanes: lanes.length, bars: count });
