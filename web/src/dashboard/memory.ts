// What the browser keeps of the history in IndexedDB, so that a reload of the page does not lose it.

import { type DBSchema, type IDBPDatabase, openDB } from "idb";
import { KEPT_S, type Snapshot, thinned } from "./history";
import { Values } from "./metrics";

const STORED_EVERY_S = 10;

interface Row {
  time: number;
  run: number;
  models: [name: string, numbers: [string, number][], buckets: [string, [number, number][]][]][];
}

interface Stored extends DBSchema {
  snapshots: { key: number; value: Row };
}

let opened: Promise<IDBPDatabase<Stored>> | undefined;
let storedTime = 0;

function database(): Promise<IDBPDatabase<Stored>> {
  opened ??= openDB<Stored>("genserve-dashboard", 1, {
    upgrade: (created) => {
      created.createObjectStore("snapshots", { keyPath: "time" });
    },
  });
  return opened;
}

/** The snapshots of the last hours. */
export async function remembered(now: number): Promise<Snapshot[]> {
  const rows = await (await database()).getAll("snapshots", IDBKeyRange.bound(now - KEPT_S, now));
  return rows.map(({ time, run, models }) => ({ time, run, models: new Map(models.map(valuesOf)) }));
}

function valuesOf([name, numbers, buckets]: Row["models"][number]): [string, Values] {
  const values = new Values();
  for (const [key, value] of numbers) values.numbers.set(key, value);
  for (const [key, counts] of buckets) values.buckets.set(key, new Map(counts));
  return [name, values];
}

/** Keep a snapshot, unless one was kept a moment ago; and forget what is too old or too dense. */
export async function remember({ time, run, models }: Snapshot): Promise<void> {
  if (time - storedTime < STORED_EVERY_S - 0.5) return;
  storedTime = time;
  const rows = [...models].map(([name, { numbers, buckets }]): Row["models"][number] => [
    name,
    [...numbers],
    [...buckets].map(([key, counts]) => [key, [...counts]]),
  ]);
  const transaction = (await database()).transaction("snapshots", "readwrite");
  const { store } = transaction;
  store.put({ time, run, models: rows });
  const times = (await store.getAllKeys()).map((key) => ({ time: key }));
  const kept = new Set(thinned(times, time).map((one) => one.time));
  for (const one of times) if (!kept.has(one.time)) store.delete(one.time);
  await transaction.done;
}
