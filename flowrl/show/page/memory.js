// The memory of the processes of a run, drawn under its lanes.
import { h } from "./dom.js";
import { bytes } from "./words.js";

export const MEMORY = 110; // pixels that it is high

const KINDS = { resident: ["in the machine's memory", []], device: ["allocated on its device", [5, 3]] };

export function drawMemory(pen, memory, { x, top, from, to, rule, words, faint, ink }) {
  const all = Object.values(memory).flat(), most = Math.max(1, ...all.flatMap((one) => Object.keys(KINDS).map((kind) => sizeOf(one, kind) ?? 0)));
  const y = (size) => top + MEMORY - 8 - (size / most) * (MEMORY - 22);
  pen.fillStyle = rule;
  pen.fillRect(from, y(0), to - from, 0.7);
  pen.fillRect(from, y(most), to - from, 0.4);
  Object.entries(memory).forEach(([, points], place) => {
    for (const [kind, [, dashes]] of Object.entries(KINDS)) {
      const known = points.filter((one) => sizeOf(one, kind) !== null);
      pen.strokeStyle = ink(place);
      pen.lineWidth = 1.5;
      pen.setLineDash(dashes);
      pen.beginPath();
      known.forEach((one, number) => (number ? pen.lineTo(x(one.time), y(sizeOf(one, kind))) : pen.moveTo(x(one.time), y(sizeOf(one, kind)))));
      pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = ink(place);
      if (known.length < 60) for (const one of known) pen.fillRect(x(one.time) - 1.5, y(sizeOf(one, kind)) - 1.5, 3, 3);
    }
  });
  pen.fillStyle = faint;
  pen.fillText(bytes(most), from + 4, y(most) - 6);
}

export function listedMemory(memory, ink) {
  const rows = Object.entries(memory).map(([process, points], place) => {
    const last = points.at(-1), most = (kind) => Math.max(...points.map((one) => sizeOf(one, kind) ?? 0));
    return h("tr", {}, h("td", {}, h("i", { class: "dot", vars: { background: ink(place) } }), h("bdi", {}, process)), h("td", { class: "number" }, bytes(sizeOf(last, "resident"))), h("td", { class: "number" }, bytes(most("resident"))),
      h("td", { class: "number" }, last.children ? bytes(last.children) : ""), h("td", { class: "number" }, last.device === null ? "" : bytes(last.device)), h("td", { class: "number" }, last.device_peak === null ? "" : bytes(last.device_peak)));
  });
  if (!rows.length) return "";
  return h("section", { class: "memory" }, h("h2", {}, "Memory at the ends of steps"), h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Process"),
    ["Resident", "The most of these", "Its other processes", "On its device", "The most ever there"].map((text) => h("th", { class: "number" }, text)))), h("tbody", {}, rows)),
    h("p", { class: "faint" }, `Lines: ${Object.values(KINDS).map(([name, dashes]) => `${dashes.length ? "broken" : "whole"} ${name}`).join(", ")}.`));
}

function sizeOf(point, kind) {
  if (kind === "device") return point.device;
  return point.resident === null ? null : point.resident + (point.children ?? 0);
}
