// The dashboard: asks for the metrics every two seconds, and plots them.

import { apiKey, theme } from "../preferences";
import { ALL, History, type Snapshot } from "./history";
import { remember, remembered } from "./memory";
import { Values } from "./metrics";
import { INFERENCE_PANELS, PANELS, type Panel } from "./panels";
import { Plot } from "./plot";

const INTERVAL_MS = 2000;
const TIMEOUT_MS = 10_000;
const MIN_SPAN_S = 30; // of the time axis, while little has been measured

const NONE = new Values();

type Row = (number | null)[];

interface Shown {
  panel: Panel;
  plot: Plot;
  rows: WeakMap<Snapshot, Row>; // what has been computed of each snapshot
}

const picker = element<HTMLSelectElement>("model");
const range = element<HTMLSelectElement>("range");
const key = element<HTMLInputElement>("key");
const pause = element<HTMLInputElement>("pause");
const status = element("status");

const history = new History();
let shown: Shown[] = [];
let shownNames = "";

function element<T extends HTMLElement>(id: string): T {
  return document.getElementById(id) as T;
}

/** Ask for the metrics once; returns what is wrong, if anything. */
async function ask(): Promise<string> {
  const headers: Record<string, string> = key.value ? { Authorization: `Bearer ${key.value}` } : {};
  let problem = "";
  try {
    const answer = await fetch("metrics?replicas=sum", { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (answer.ok) {
      const snapshot = history.add(await answer.text(), Date.now() / 1000);
      remember(snapshot).catch(() => {}); // the browser keeps nothing
    } else if (answer.status !== 401)
      problem = `The server answers with status ${answer.status}; trying again.`;
    else problem = key.value ? "The API key is wrong." : "The server asks for its API key.";
    key.toggleAttribute("aria-invalid", answer.status === 401);
  } catch {
    problem = "The server does not answer; trying again.";
  }
  if (problem) history.interrupt();
  return problem;
}

function show(): void {
  const now = history.last;
  if (!now) return;
  writePicker();
  choosePlots();
  const first = Math.min(history.snapshots[0]?.time ?? now.time, now.time - MIN_SPAN_S);
  const from = Math.max(first, now.time - Number(range.value));
  const kept = history.snapshots.filter(({ time }) => time >= from - INTERVAL_MS / 1000);
  for (const { panel, plot, rows } of shown) {
    const points = kept.flatMap((snapshot, place) => {
      const point = { time: snapshot.time, row: rowOf(panel, snapshot, rows) };
      const earlier = kept[place - 1];
      if (!earlier || earlier.run === snapshot.run) return [point];
      return [{ time: (earlier.time + snapshot.time) / 2, row: panel.lines.map(() => null) }, point]; // a gap
    });
    const lines = panel.lines.map((_, index) => points.map(({ row }) => row[index] ?? null));
    plot.show(
      points.map(({ time }) => time),
      lines,
      from,
      now.time,
    );
  }
}

function rowOf(panel: Panel, snapshot: Snapshot, rows: WeakMap<Snapshot, Row>): Row {
  const known = rows.get(snapshot);
  if (known) return known;
  const before = history.before(snapshot);
  const now = snapshot.models.get(picker.value);
  const row = panel.lines.map(({ measure, isGauge }) => {
    if (!now || !(before || isGauge)) return null;
    const earlier = before?.models.get(picker.value);
    return measure(now, earlier ?? NONE, snapshot.time - (before?.time ?? 0));
  });
  rows.set(snapshot, row);
  return row;
}

/** Have the plots of the chosen model on the page. */
function choosePlots(): void {
  const values = history.last?.models.get(picker.value);
  if (!values) return;
  const known = [...PANELS, ...INFERENCE_PANELS];
  const isText = values.numbers.has(PANELS[0]?.needs ?? "");
  const panels = (isText ? PANELS : INFERENCE_PANELS).filter(
    ({ needs, isOptional }) => values.numbers.has(needs) && !(isOptional && values.get(needs) === 0),
  );
  const names = [picker.value, ...panels.map((panel) => known.indexOf(panel))].join("\n");
  if (names === shownNames) return;
  shownNames = names;
  shown = panels.map((panel) => ({ panel, plot: new Plot(panel), rows: new WeakMap() }));
  element("plots").replaceChildren(...shown.map(({ plot }) => plot.element));
}

/** Have the models of the server in the picker. */
function writePicker(): void {
  const { text, others } = history.names;
  const all = text.length > 1 ? [new Option("All text models", ALL)] : [];
  const options = [...all, ...text.map((name) => new Option(name))];
  const group = document.createElement("optgroup");
  group.label = "Other models";
  group.append(...others.map((name) => new Option(name)));
  const written = [...options.map(({ value }) => value), "", ...others].join("\n");
  if (written === picker.dataset.written) return;
  picker.dataset.written = written;
  const chosen = picker.value;
  picker.replaceChildren(...options, ...(others.length ? [group] : []));
  if ([...picker.options].some(({ value }) => value === chosen)) picker.value = chosen;
}

async function run(): Promise<void> {
  const problem = await ask();
  status.textContent = problem || `Updated ${new Date().toLocaleTimeString([], { hourCycle: "h23" })}`;
  status.classList.toggle("problem", Boolean(problem));
  if (!pause.checked) show();
}

let timer = 0;

/** Read the metrics now, and from then on at regular intervals. */
async function start(): Promise<void> {
  clearTimeout(timer);
  await run();
  clearTimeout(timer);
  timer = setTimeout(start, INTERVAL_MS);
}

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => {
  for (const { plot } of shown) plot.redraw();
});
document.documentElement.dataset.theme = theme.value;
key.value = apiKey.value;
key.addEventListener("change", () => {
  apiKey.value = key.value;
  start();
});
for (const control of [picker, range, pause]) control.addEventListener("change", show);
const openedTime = Date.now() / 1000;
history.restore(await remembered(openedTime).catch(() => []), openedTime);
start();
