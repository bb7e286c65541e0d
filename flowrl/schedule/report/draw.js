// How lanes, bars, steps, memory and the strip of the whole run are painted.

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

// Bars of a row. What is thinner than a dot and a half goes into columns of one dot, each as strong as the part of it
// that bars cover. A bar with nothing beside it is drawn strong enough to be found.
function drawRow(pen, items, { start, scale, top, height, words }) {
  let column = -1, touched = [], inside = 0, drawn = 0, before = -2;
  const flush = (next) => {
    if (!touched.length) return;
    let best = touched[0], full = 0;
    for (const node of touched) {
      full += weights[node];
      if (weights[node] > weights[best]) best = node;
      weights[node] = 0;
    }
    const alone = inside === 1 && before < column - 1 && next > column + 1;
    pen.globalAlpha = clamp(full, alone ? 0.4 : 0, 1);
    pen.fillStyle = nodes[best].fill;
    pen.fillRect(column, top, 1, height);
    before = column;
    touched = [];
    inside = 0;
    drawn++;
  };
  for (let k = firstOf(items, start - slack, bars.end); k < items.length; k++) {
    const i = items[k], left = (bars.start[i] - start) * scale;
    if (left > width) break;
    const right = (bars.end[i] - start) * scale, faded = dim(i), node = bars.node[i];
    if (right - left >= 1.5) {
      flush(left);
      drawBar(pen, i, Math.max(left, -4), Math.min(right, width + 4), top, height, faded, words);
      before = Math.floor(right);
      drawn++;
      continue;
    }
    for (let at = Math.floor(left); at <= Math.floor(right); at++) {
      const part = Math.min(right, at + 1) - Math.max(left, at);
      if (part <= 0 && at > Math.floor(left)) break;
      if (at !== column) {
        flush(at);
        column = at;
      }
      if (!touched.includes(node)) touched.push(node);
      if (at === Math.floor(left)) inside++;
      weights[node] += part * (faded ? 0.15 : 1);
    }
  }
  flush(Infinity);
  pen.globalAlpha = 1;
  return drawn;
}

function drawBar(pen, i, left, right, top, height, faded, words) {
  const look = nodes[bars.node[i]];
  const wide = right - left - (right - left > 5 ? 1 : 0);
  const inset = look.move && height > 8 ? Math.round(height * 0.18) : 0;
  pen.globalAlpha = faded ? 0.15 : 1;
  pen.fillStyle = look.move && wide > 4 ? colours.paper : look.fill;
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
  pen.fillStyle = look.move ? colours.ink : look.ink;
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
  const y = (size) => base - (size / full) * (high - 4);
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
  if (count || makespan) drawAxis(pen, bottom);
  else pen.fillText("nothing ran", 8, AXIS / 2);
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
