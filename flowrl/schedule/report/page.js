"use strict";
// The page of a simulation: lanes of bars on a canvas, zoom, cards, marks, keys. Texts are set as text, never as markup.
(() => {
  const { bars, nodes, pools, reasons, makespan } = JSON.parse(document.getElementById("record").textContent);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const [view, canvas, overview, names, card, seen] =
    ["view", "canvas", "overview", "names", "card", "seen"].map((id) => document.getElementById(id));
  const count = bars.start.length;
  const total = Math.max(makespan, bars.end.reduce((most, end) => Math.max(most, end), 0)) || 1;
  const slack = total * 1e-9;
  const clamp = (x, least, most) => Math.min(Math.max(x, least), Math.max(least, most));
  const AXIS = 44, ROW = 24, GAP = 7, MEMORY = 46, LEAST = 62;

  // -- what is where ----------------------------------------------------------------------------------------------
  const tight = pools.length > 60;
  let bottom = AXIS;
  const lanes = pools.map((pool) => {
    const count = Math.max(pool.rows, 1);
    const height = clamp(Math.floor(132 / count), 3, tight ? 18 : ROW);
    const drawn = count * (height + 2);
    const memory = pool.memory.length ? MEMORY : 0;
    const whole = Math.max(drawn + memory + 2 * GAP, tight ? 26 : LEAST);
    const lane = { pool, top: bottom, whole, row: height, first: bottom + (memory ? GAP : (whole - drawn) / 2), memory };
    lane.rows = Array.from({ length: count }, () => []);
    lane.items = [];
    bottom += whole;
    return lane;
  });
  const steps = new Map(); // number: first start, last end
  const titled = new Map(); // title: bars by their end
  const before = new Float64Array(count); // seconds that the pool did nothing before a bar
  const pieces = nodes.map(() => 1);
  const title = (node) => nodes[node].id.split("#")[0];
  let shortest = Infinity;
  {
    const busyUntil = pools.map(() => 0);
    for (let i = 0; i < count; i++) {
      const lane = bars.lane[i], step = bars.step[i], start = bars.start[i], end = bars.end[i];
      lanes[lane].rows[bars.row[i]].push(i);
      lanes[lane].items.push(i);
      before[i] = Math.max(0, start - busyUntil[lane]);
      busyUntil[lane] = Math.max(busyUntil[lane], end);
      pieces[bars.node[i]] = Math.max(pieces[bars.node[i]], bars.piece[i] + 1);
      if (end > start) shortest = Math.min(shortest, end - start);
      const name = title(bars.node[i]);
      if (!titled.has(name)) titled.set(name, []);
      titled.get(name).push(i);
      if (step < 0) continue;
      const known = steps.get(step);
      if (!known) steps.set(step, { first: start, last: end });
      else known.last = Math.max(known.last, end);
    }
    for (const items of titled.values()) items.sort((a, b) => bars.end[a] - bars.end[b]);
  }
  const numbers = [...steps.keys()].sort((a, b) => a - b);
  const narrowest = Math.min(total, Math.max(total * 1e-11, (Number.isFinite(shortest) ? shortest : total) * 2));

  // -- words ------------------------------------------------------------------------------------------------------
  const brief = (x) => String(Number(x.toPrecision(3)));

  function duration(seconds) { // as in the tables
    const small = [[0.9995e-6, 1e9, "ns"], [0.9995e-3, 1e6, "µs"], [0.9995, 1e3, "ms"], [999.5, 1, "s"]];
    if (!(seconds > 0)) return "0 s";
    for (const [limit, factor, unit] of small) if (seconds < limit) return `${brief(seconds * factor)} ${unit}`;
    for (const [step, per, most, big, unit] of [[1, 60, 7200, "min", "s"], [60, 60, 2880, "h", "min"], [3600, 24, Infinity, "d", "h"]]) {
      const n = Math.round(seconds / step);
      if (n < most) return `${Math.floor(n / per)} ${big} ${n % per} ${unit}`;
    }
    return "";
  }

  function volume(bytes) {
    const [factor, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]].find(([f]) => bytes >= f * 0.9995) || [1, "B"];
    return `${brief(bytes / factor)} ${unit}`;
  }

  function unitOf(most, step) { // for points in time: what they are counted in
    if (most < 1e-3) return [1e-6, "µs"];
    if (most < 1) return [1e-3, "ms"];
    return most >= 36000 && step >= 90 ? [3600, "h"] : [1, "s"];
  }

  function moment(seconds, step, most = total) { // a point in time, with the digits that a step asks for
    const [unit, name] = unitOf(most, step);
    const decimals = clamp(Math.ceil(-Math.log10(step / unit) - 1e-9), 0, 9);
    const said = (seconds / unit).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
    return `${said.replaceAll(",", "\u202f")} ${name}`;
  }

  const exact = (seconds) => moment(seconds, Math.max(Math.min(shortest, total) / 1000, total * 1e-9)).replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
  const stepName = (step) => (step < 0 ? "outside of steps" : String(step));

  // -- what is seen -----------------------------------------------------------------------------------------------
  let from = 0, to = total, width = 800, ratio = 1;
  let over = -1, cursor = -1, chosen = null, lit = null, hint = null, pulled = null;
  let colours = {};
  const x = (time) => ((time - from) / (to - from)) * width;
  const time = (px) => from + (px / width) * (to - from);

  function look(start, end) {
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
    look(start - edge, end + edge);
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
    seen.textContent = marked + range;
    for (const [id, value] of [["from", within[0]], ["to", within[within.length - 1]]]) {
      const field = document.getElementById(id);
      if (document.activeElement !== field) field.value = value === undefined ? "" : value;
    }
  }

  // -- drawing ------------------------------------------------------------------------------------------------------
  function theme() {
    const style = getComputedStyle(document.documentElement);
    colours = Object.fromEntries(
      ["paper", "ink", "faint", "rule", "accent", "band", "mark"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    colours.font = getComputedStyle(document.body).fontFamily;
  }

  function fitted(target, height) { // the canvas at the size of the screen's dots
    ratio = Math.min(devicePixelRatio || 1, 30000 / height);
    const wide = Math.round(width * ratio), high = Math.round(height * ratio);
    if (target.width !== wide || target.height !== high) {
      target.width = wide;
      target.height = high;
      target.style.height = `${height}px`;
    }
    const pen = target.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return pen;
  }

  const dim = (i) => (chosen !== null && bars.step[i] !== chosen) || (lit !== null && bars.node[i] !== lit);

  function firstOf(items, at, key) { // the first place in items whose key is at least that
    let low = 0, high = items.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (key[items[middle]] < at) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  const weights = new Float64Array(nodes.length);

  // Bars of a row. What is thinner than a dot goes into columns of one dot, as strong as they are full.
  function drawRow(pen, items, { start, scale, top, height, words }) {
    let column = -1, touched = [], drawn = 0;
    const flush = () => {
      if (!touched.length) return;
      let best = touched[0], sum = 0;
      for (const node of touched) {
        sum += weights[node];
        if (weights[node] > weights[best]) best = node;
      }
      pen.globalAlpha = clamp(sum, 0.22, 1);
      pen.fillStyle = nodes[best].fill;
      pen.fillRect(column, top, 1, height);
      for (const node of touched) weights[node] = 0;
      touched = [];
      drawn++;
    };
    for (let k = firstOf(items, start - slack, bars.end); k < items.length; k++) {
      const i = items[k], left = (bars.start[i] - start) * scale;
      if (left > width) break;
      const right = (bars.end[i] - start) * scale, faded = dim(i), node = bars.node[i];
      if (right - left >= 1.5) {
        flush();
        drawBar(pen, i, Math.max(left, -4), Math.min(right, width + 4), top, height, faded, words);
        drawn++;
        continue;
      }
      if (Math.floor(left) !== column) {
        flush();
        column = Math.floor(left);
      }
      if (!weights[node]) touched.push(node);
      weights[node] += Math.max(right - left, 0.3) * (faded ? 0.15 : 1);
    }
    flush();
    pen.globalAlpha = 1;
    return drawn;
  }

  function drawBar(pen, i, left, right, top, height, faded, words) {
    const look = nodes[bars.node[i]];
    const wide = right - left - (right - left > 5 ? 1 : 0);
    const inset = look.move && height > 8 ? Math.round(height * 0.18) : 0;
    pen.globalAlpha = faded ? 0.15 : 1;
    pen.fillStyle = look.fill;
    pen.fillRect(left, top + inset, wide, height - 2 * inset);
    if (look.move && wide > 4) {
      pen.strokeStyle = look.edge;
      pen.lineWidth = 1;
      pen.strokeRect(left + 0.5, top + inset + 0.5, wide - 1, height - 2 * inset - 1);
    }
    if (!words || height < 14 || wide < 26) return;
    const begin = Math.max(left, 0) + 5, space = Math.min(left + wide, width) - begin - 4;
    const said = fitting(pen, look.id, bars.step[i], space);
    if (!said) return;
    pen.fillStyle = look.ink;
    pen.fillText(said, begin, top + height / 2 + 0.5);
  }

  const widths = new Map();

  function wideOf(pen, text) {
    if (widths.size > 5000) widths.clear();
    if (!widths.has(text)) widths.set(text, pen.measureText(text).width);
    return widths.get(text);
  }

  function fitting(pen, id, step, space) { // the most that can be said in that space
    const op = id.slice(id.lastIndexOf(".") + 1);
    const tail = step < 0 ? "" : `  ${step}`;
    return [id + tail, id, op + tail, op].find((text) => text.length < 200 && wideOf(pen, text) <= space);
  }

  function ticks() {
    const rough = ((to - from) / width) * 110;
    const [unit] = unitOf(total, rough);
    const power = 10 ** Math.floor(Math.log10(rough / unit));
    return [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough / unit * 0.999) * unit;
  }

  function drawAxis(pen, height) {
    const step = ticks();
    pen.textAlign = "center";
    for (let n = Math.max(0, Math.ceil(from / step - 1e-9)); n * step <= to; n++) {
      const at = Math.round(x(n * step)) + 0.5;
      pen.fillStyle = colours.rule;
      pen.globalAlpha = 0.55;
      pen.fillRect(at - 0.5, AXIS - 5, 1, height - AXIS + 5);
      pen.globalAlpha = 1;
      pen.fillStyle = colours.faint;
      const said = moment(n * step, step);
      const half = pen.measureText(said).width / 2;
      pen.fillText(said, clamp(at, half + 3, width - half - 3), AXIS - 13);
    }
    pen.textAlign = "left";
  }

  function drawSteps(pen, height) { // where each begins
    let free = -Infinity, last = -Infinity;
    for (const number of numbers) {
      const at = Math.round(x(steps.get(number).first));
      if (at < -60 || at > width || at - last < 4) continue;
      last = at;
      const marked = number === chosen;
      pen.fillStyle = marked ? colours.accent : colours.faint;
      pen.globalAlpha = marked ? 1 : 0.5;
      for (let y = 0; y < height; y += 6) pen.fillRect(at, y, 1, y < 18 ? 6 : 3);
      pen.globalAlpha = 1;
      const said = `step ${number}`, left = Math.max(at + 5, 3);
      if (left >= free) {
        pen.fillText(said, left, 10);
        free = left + pen.measureText(said).width + 10;
      }
    }
  }

  function drawMemory(pen, lane) {
    const { memory, capacity } = lane.pool;
    if (!memory.length) return;
    const high = lane.memory - 8, base = lane.top + lane.whole - GAP;
    const peak = memory.reduce((most, [, size]) => Math.max(most, size), 0), full = Math.max(peak, capacity) || 1;
    const y = (size) => base - (size / full) * (high - 12);
    pen.beginPath();
    let begun = false;
    memory.forEach(([at, size], k) => {
      const end = k + 1 < memory.length ? memory[k + 1][0] : total;
      if (end < from || at > to) return;
      const left = clamp(x(at), -2, width + 2), right = clamp(x(end), -2, width + 2);
      if (!begun) pen.moveTo(left, base);
      begun = true;
      pen.lineTo(left, y(size));
      pen.lineTo(right, y(size));
      lane.right = right;
    });
    if (begun) {
      pen.strokeStyle = colours.accent;
      pen.lineWidth = 1.2;
      pen.stroke();
      pen.lineTo(lane.right, base);
      pen.globalAlpha = 0.16;
      pen.fillStyle = colours.accent;
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.fillStyle = colours.faint;
    if (capacity) for (let at = 0; at < width; at += 8) pen.fillRect(at, Math.round(y(capacity)), 4, 1);
    const said = `memory: at most ${volume(peak)}${capacity ? ` of ${volume(capacity)} on a device` : " on a device"}`;
    const wide = pen.measureText(said).width;
    pen.globalAlpha = 0.8;
    pen.fillStyle = colours.paper;
    pen.fillRect(3, base - high + 15, wide + 6, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = colours.faint;
    pen.fillText(said, 6, base - high + 23);
  }

  function box(i) { // where a bar is on the canvas
    const lane = lanes[bars.lane[i]];
    const left = x(bars.start[i]), right = Math.max(x(bars.end[i]), left + 2);
    return { left, right, top: lane.first + bars.row[i] * (lane.row + 2), height: lane.row };
  }

  function drawCause(pen, i) { // an arrow from what the bar waited for
    const cause = causeOf(i);
    if (cause < 0) return;
    const a = box(cause), b = box(i), y0 = a.top + a.height / 2, y1 = b.top + b.height / 2;
    if (Math.abs(y0 - y1) < 2 && Math.abs(a.right - b.left) < 12) return;
    const bend = Math.max(14, Math.abs(b.left - a.right) / 2);
    pen.strokeStyle = pen.fillStyle = colours.ink;
    pen.lineWidth = 1.4;
    pen.beginPath();
    pen.moveTo(a.right - 2, y0);
    pen.bezierCurveTo(a.right + bend, y0, b.left - bend, y1, b.left - 5, y1);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(b.left, y1);
    pen.lineTo(b.left - 7, y1 - 4);
    pen.lineTo(b.left - 7, y1 + 4);
    pen.fill();
  }

  let drawn = { bars: 0, ms: 0 };

  function draw() {
    const began = performance.now();
    const pen = fitted(canvas, bottom);
    pen.font = `12px ${colours.font}`;
    pen.textBaseline = "middle";
    lanes.forEach((lane, n) => {
      pen.fillStyle = n % 2 ? colours.band : colours.paper;
      pen.fillRect(0, lane.top, width, lane.whole);
    });
    if (chosen !== null) {
      const { first, last } = steps.get(chosen);
      pen.fillStyle = colours.mark;
      pen.fillRect(x(first), AXIS, Math.max(x(last) - x(first), 1), bottom - AXIS);
    }
    drawAxis(pen, bottom);
    drawSteps(pen, bottom);
    const scale = width / (to - from);
    let shown = 0;
    for (const lane of lanes) {
      lane.rows.forEach((items, row) => {
        shown += drawRow(pen, items, { start: from, scale, top: Math.round(lane.first + row * (lane.row + 2)), height: lane.row, words: true });
      });
      drawMemory(pen, lane);
      pen.fillStyle = colours.rule;
      pen.fillRect(0, lane.top, width, 1);
    }
    for (const i of [cursor, over]) {
      if (i < 0) continue;
      const { left, right, top, height } = box(i);
      drawCause(pen, i);
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left, Math.round(top) - 1, right - left, height + 2);
    }
    if (pulled && pulled.kind === "choose") {
      pen.fillStyle = colours.mark;
      pen.fillRect(Math.min(pulled.x, pulled.now), 0, Math.abs(pulled.now - pulled.x), bottom);
    }
    drawOverview();
    drawn = { bars: shown, ms: performance.now() - began };
  }

  let whole = null; // the strip of the whole run, drawn once for each look

  function drawOverview() {
    const high = 34, key = `${width} ${ratio} ${colours.paper} ${chosen} ${lit}`;
    const pen = fitted(overview, high);
    if (!whole || whole.key !== key) {
      const strip = document.createElement("canvas");
      const ink = fitted(strip, high);
      const each = (high - 8) / Math.max(lanes.length, 1);
      lanes.forEach((lane, n) => lane.rows.forEach((items, row) => {
        const tall = each / lane.rows.length;
        drawRow(ink, items, { start: 0, scale: width / total, top: 4 + n * each + row * tall, height: Math.max(tall - (tall > 4 ? 1 : 0), 0.5), words: false });
      }));
      whole = { key, strip };
    }
    pen.drawImage(whole.strip, 0, 0, width, high);
    const left = (from / total) * width, right = Math.max((to / total) * width, left + 3);
    pen.globalAlpha = 0.62;
    pen.fillStyle = colours.paper;
    pen.fillRect(0, 0, left, high);
    pen.fillRect(right, 0, width - right, high);
    pen.globalAlpha = 1;
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 1.5;
    pen.strokeRect(left + 0.75, 0.75, Math.max(right - left - 1.5, 1.5), high - 1.5);
  }

  let due = false;

  function later() {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      draw();
    });
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
    chosen = step === null || step < 0 || !steps.has(step) || step === chosen && over >= 0 ? null : step;
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
      over = -1;
      choose(step === undefined || step === chosen ? null : step);
    } else if (i >= 0) {
      over = i;
      cursor = i;
      choose(bars.step[i]);
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
})();
