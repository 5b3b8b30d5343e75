// The dialog that loads and unloads the models of the repository.

import { useEffect, useState } from "preact/hooks";
import { type IndexEntry, loadModel, modelIndex, unloadModel } from "../api";
import { connect, dialog, models } from "../state";
import { Dialog } from "./dialog";

const POLL_MS = 500;
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
      setProblem("");
      await work();
    } catch (error) {
      setProblem((error as Error).message);
    }
  };
  const list = () => attempt(async () => setEntries(await modelIndex()));
  useEffect(() => {
    list();
  }, []);
  const change = async ({ name, state }: IndexEntry) => {
    setWorking(`${state === "READY" ? "Unloading" : "Loading"} ${name}…`);
    await attempt(async () => {
      if (state !== "READY") await loadModel(name);
      else {
        await unloadModel(name);
        while (await isServed(name)) await new Promise((done) => setTimeout(done, POLL_MS));
      }
      setEntries(await modelIndex());
      await connect();
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

function about({ name, state, reason }: IndexEntry): string {
  const isText = models.value.some(({ id }) => id === name);
  if (state === "READY") return isText ? "ready, generates text" : "ready";
  if (state === "LOADING" || state === "UNLOADING") return state.toLowerCase();
  return reason && reason !== "unloaded" ? `not loaded: ${reason}` : "not loaded";
}

async function isServed(name: string): Promise<boolean> {
  const entries = await modelIndex();
  return entries.some((entry) => entry.name === name && ["READY", "UNLOADING"].includes(entry.state ?? ""));
}
