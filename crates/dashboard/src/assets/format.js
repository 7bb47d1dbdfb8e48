// Numbers, sizes and times as text. The space in front of a unit does not break lines.

/** A number for a table, with about four digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (size < 1e-3 || size >= 1e15) return Number(value.toPrecision(3)).toExponential();
  if (size >= 1e5) return short(value);
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(4)));
}

/** A large number with a letter: 12.3k, 4.5M. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}\u00a0${unit}`;
  }
  return `${Math.round(value)}\u00a0B`;
}

/** Seconds: 850 µs, 12 ms, 1.5 s, 3m 05s, 2h 10m, 3d 4h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0\u00a0s";
  if (seconds < 1e-3) return `${Number((seconds * 1e6).toPrecision(3))}\u00a0µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))}\u00a0ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))}\u00a0s`;
  const two = (part) => String(part).padStart(2, "0");
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${two(Math.floor(whole / 60) % 60)}m`;
  return `${Math.floor(whole / 86400)}d ${Math.floor(whole / 3600) % 24}h`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Number((100 * share).toPrecision(3))}\u00a0%`);

/** How to write the numbers of a metric. */
export function formatOf(key) {
  if (key.endsWith("_seconds")) return duration;
  if (key.endsWith("_bytes")) return bytes;
  if (key === "mfu") return percent;
  return number;
}

/** A step, tokens or seconds on the horizontal axis. */
export function axisFormat(axis) {
  if (axis === "seconds") return duration;
  if (axis === "tokens") return short;
  return (value) => (Math.abs(value) >= 1e6 ? short(value) : String(Math.round(value * 100) / 100));
}

/** Round positions between two values, about `count` of them; of bytes, round in powers of two. */
export function ticks(low, high, count, format = null) {
  if (format === bytes && high - low > 4) {
    const step = 2 ** Math.ceil(Math.log2((high - low) / count));
    return ticksEvery(step, low, high);
  }
  const span = high - low;
  if (!(span > 0) || !Number.isFinite(span)) return [low];
  const raw = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  return ticksEvery(step, low, high);
}

function ticksEvery(step, low, high) {
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

/** Powers of ten between two positive values; with 2 and 5 if there are few. */
export function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low);
  const factors = decades < 2.2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / 6));
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % every !== 0) continue;
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}
