// The dialog with the models of the repository: what each takes, and how to load and unload it.

import { useEffect, useState } from "preact/hooks";
import { type IndexEntry, loadModel, modelIndex, unloadModel } from "../api";
import { connect, dialog, models } from "../state";
import { Dialog } from "./dialog";

const POLL_MS = 500;
const REFRESH_MS = 2000; // other clients load and unload models, too
const STAGE = /^(.+)_(tokenizer|logits|decoder)$/;

export function Models() {
  const [entries, setEntries] = useState<IndexEntry[] | null>(null);
  const [problem, setProblem] = useState("");
  const [working, setWorking] = useState("");
  const close = () => {
    dialog.value = "";
  };
  const attempt = async (work: () => Promise<unknown>) => {
    try {
      await work();
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  const list = async () => {
    const found = await modelIndex();
    await connect();
    setEntries(found);
  };
  useEffect(() => {
    attempt(list);
    const timer = setInterval(() => list().catch(() => undefined), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  const change = async ({ name, state }: IndexEntry) => {
    setProblem("");
    setWorking(`${state === "READY" ? "Unloading" : "Loading"} ${name}…`);
    await attempt(async () => {
      if (state !== "READY") await loadModel(name);
      else {
        await unloadModel(name);
        while (await isServed(name)) await new Promise((done) => setTimeout(done, POLL_MS));
      }
      await list();
    });
    setWorking("");
  };
  return (
    <Dialog title="Models" onClose={close}>
      <p class="faint">
        The models in the server's repository. Those that generate text can be chatted with.
      </p>
      {problem && (
        <div class="error" role="alert">
          <p>{problem}</p>
        </div>
      )}
      {!entries && !problem && <p>Asking the server…</p>}
      <ul class="models">
        {(entries ?? []).filter(isWhole(entries ?? [])).map((entry) => (
          <li key={`${entry.name} ${entry.version}`}>
            <span class="models-name">{entry.name}</span>
            <span class="faint">{about(entry)}</span>
            <button type="button" class="small" disabled={working !== ""} onClick={() => change(entry)}>
              {entry.state === "READY" ? "Unload" : "Load"}
              <span class="only-spoken"> {entry.name}</span>
            </button>
          </li>
        ))}
      </ul>
      <p class="faint">{total()}</p>
      <p role="status" class="faint">
        {working}
      </p>
    </Dialog>
  );
}

/** Whether an entry is not the stage of a text model, which is loaded and unloaded with it. */
function isWhole(entries: IndexEntry[]): (entry: IndexEntry) => boolean {
  const names = new Set(entries.map(({ name }) => name));
  return ({ name }) => !names.has(STAGE.exec(name)?.[1] ?? "");
}

/** The state of a model, its memory, and until when it stays. */
function about({ name, state, reason }: IndexEntry): string {
  const status = models.value.find(({ id }) => id === name)?.status;
  if (status?.value === "loading") return "loading";
  if (state === "LOADING" || state === "UNLOADING") return state.toLowerCase();
  if (state !== "READY") return reason && reason !== "unloaded" ? `not loaded: ${reason}` : "not loaded";
  const parts = [status ? "ready, generates text" : "ready"];
  if (status?.memory_bytes) parts.push(`up to ${gigabytes(status.memory_bytes)}`);
  if (status?.remaining_s !== undefined)
    parts.push(`leaves in ${time(status.remaining_s)} unless it is used`);
  return parts.join(", ");
}

/** The memory that all text models together may take. */
function total(): string {
  const sizes = models.value.map(({ status }) => status?.memory_bytes ?? 0);
  const sum = sizes.reduce((one, other) => one + other, 0);
  return sum ? `Text models take up to ${gigabytes(sum)} of memory, their KV caches included.` : "";
}

function gigabytes(bytes: number): string {
  return bytes < 1e8 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;
}

function time(seconds: number): string {
  return seconds < 60 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
}

async function isServed(name: string): Promise<boolean> {
  const entries = await modelIndex();
  return entries.some((entry) => entry.name === name && ["READY", "UNLOADING"].includes(entry.state ?? ""));
}
