// Requests to the server, and the series that the charts show.

/** JSON from a path. Without a valid cookie, the server's own page asks for the token. */
export async function get(path, parameters = {}, signal = undefined) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  const response = await fetch(query ? `${path}?${query}` : path, { signal, credentials: "same-origin" });
  if (response.status === 401) {
    location.reload();
    throw new Error("the token is missing");
  }
  const json = await response.json();
  if (!response.ok) throw new Error(json.error ?? `status ${response.status}`);
  return json;
}

// Beyond this many single points, the server's summary of a series is smaller than the series.
const MAX_POINTS = 2400;
export const BUCKETS = 600;

/**
 * The series of one run, as a chart shows them: `{key: {x, y, low, high, not_finite}}`. A run in progress is followed by
 * asking only for what is new.
 */
export class RunSeries {
  constructor(id) {
    this.id = id;
    this.clear();
  }

  clear() {
    this.series = new Map();
    this.position = null;
    this.view = "";
  }

  /** Brings `keys` up to date for an axis and a range. */
  async update(keys, axis, range) {
    const view = JSON.stringify([keys, axis, range]);
    const isLong = [...this.series.values()].some((one) => one.x.length > MAX_POINTS);
    const follows = view === this.view && !range && !isLong && this.position;
    const answer = await get(`/api/runs/${this.id}/series`, {
      keys: keys.join(","),
      x: axis,
      buckets: BUCKETS,
      from: range?.from,
      to: range?.to,
      after: follows ? this.position.rows : null,
      generation: follows ? this.position.generation : null,
    });
    const appends = follows && answer.from_row === this.position.rows && answer.generation === this.position.generation;
    const fresh = appends ? this.series : new Map();
    for (const one of answer.series) {
      const known = appends ? fresh.get(one.key) : null;
      fresh.set(one.key, known ? joined(known, one) : one);
    }
    this.series = fresh;
    this.position = { rows: answer.rows, generation: answer.generation };
    this.view = view;
  }

  get(key) {
    const found = this.series.get(key);
    return found && (found.x.length > 0 || found.not_finite.length > 0) ? found : null;
  }
}

/** A series with new points at its end. One with buckets keeps them, and the points are buckets of one. */
function joined(known, more) {
  const bands = known.low.length > 0 || more.low.length > 0;
  const band = (one, name) => (one[name].length > 0 ? one[name] : one.y);
  return {
    key: known.key,
    x: known.x.concat(more.x),
    y: known.y.concat(more.y),
    low: bands ? band(known, "low").concat(band(more, "low")) : [],
    high: bands ? band(known, "high").concat(band(more, "high")) : [],
    not_finite: known.not_finite.concat(more.not_finite),
  };
}
