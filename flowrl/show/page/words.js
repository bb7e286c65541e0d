// Numbers, times and sizes as people read them.

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (size < 120) return `${Number(value.toPrecision(3))} s`;
  if (size < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${Number(value.toPrecision(3))} ${units[unit]}`;
}

export function moment(unix) {
  return unix === null || unix === undefined ? "–" : new Date(unix * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

export function plural(count, one, several = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : several}`;
}
