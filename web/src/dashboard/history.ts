// What has been measured in the last hours: the older, the less often.

import { readMetrics, Values } from "./metrics";

/** The key of the sum of all models that generate text. */
export const ALL = "";
/** The seconds over which rates and percentiles are computed. */
export const WINDOW_S = 10;
export const KEPT_S = 6 * 3600;
// Snapshots older than an age are thinned out to one in each interval.
const DENSITIES = [
  { olderThan: 3600, interval: 60 },
  { olderThan: 300, interval: 10 },
];
const RELOAD_S = 30; // in which a page that is opened again continues its lines

export interface Snapshot {
  time: number; // seconds since 1970
  models: Map<string, Values>; // with ALL
  run: number; // counters of different runs of the server cannot be compared
}

export class History {
  readonly snapshots: Snapshot[] = [];
  private run = 0;

  get last(): Snapshot | undefined {
    return this.snapshots.at(-1);
  }

  /** The names of the models that generate text, and of the others. */
  get names(): { text: string[]; others: string[] } {
    const models = [...(this.last?.models ?? [])].filter(([name]) => name !== ALL);
    const of = (isText: boolean) =>
      models.filter(([, values]) => generatesText(values) === isText).map(([name]) => name);
    return { text: of(true).sort(), others: of(false).sort() };
  }

  /** Continue what an earlier page has measured. */
  restore(snapshots: Snapshot[], now: number): void {
    this.snapshots.unshift(...snapshots);
    const last = snapshots.at(-1);
    if (last) this.run = last.run + (now - last.time > RELOAD_S ? 1 : 0);
  }

  /** Add the metrics of now; returns the snapshot. */
  add(text: string, time: number): Snapshot {
    const models = readMetrics(text);
    const all = new Values();
    for (const values of models.values()) if (generatesText(values)) all.merge(values);
    models.set(ALL, all);
    if (this.last && hasRestarted(this.last.models, models)) this.run += 1;
    const snapshot = { time, models, run: this.run };
    this.snapshots.push(snapshot);
    this.snapshots.splice(0, this.snapshots.length, ...thinned(this.snapshots, time));
    return snapshot;
  }

  /** Note that the server did not answer: what is measured afterwards is compared with nothing before. */
  interrupt(): void {
    this.run += 1;
  }

  /** The snapshot with which one is compared: of WINDOW_S before, or the oldest since then, or else the last. */
  before(snapshot: Snapshot): Snapshot | undefined {
    let found: Snapshot | undefined;
    for (let place = this.snapshots.indexOf(snapshot) - 1; place >= 0; place -= 1) {
      const earlier = this.snapshots[place] as Snapshot;
      const isLongAgo = snapshot.time - earlier.time > WINDOW_S + 0.5;
      if (earlier.run !== snapshot.run || (found && isLongAgo)) break;
      found = earlier;
    }
    return found;
  }
}

/** What is kept of snapshots, which are in the order of their times. */
export function thinned<T extends { time: number }>(snapshots: T[], now: number): T[] {
  let last = "";
  return snapshots.filter(({ time }) => {
    const age = now - time;
    if (age > KEPT_S) return false;
    const interval = DENSITIES.find(({ olderThan }) => age > olderThan)?.interval;
    const place = interval ? `${interval} ${Math.floor(time / interval)}` : "";
    const isKept = !place || place !== last;
    last = place;
    return isKept;
  });
}

function generatesText(values: Values): boolean {
  return values.numbers.has("genserve_num_requests_running");
}

/** Whether a counter has gone back. */
function hasRestarted(before: Map<string, Values>, now: Map<string, Values>): boolean {
  for (const [model, values] of now) {
    for (const [name, value] of before.get(model)?.numbers ?? []) {
      if (/_(total|count)(\/|$)/.test(name) && !name.includes("pending") && values.get(name) < value)
        return true;
    }
  }
  return false;
}
