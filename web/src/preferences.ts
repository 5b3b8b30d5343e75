// What the browser remembers besides conversations: in localStorage, or for one tab in sessionStorage.

import { effect, type Signal, signal } from "@preact/signals";
import type { Settings, Setup, TextFile } from "./conversation";

const PREFIX = "genserve.";

function read<T>(storage: Storage, name: string): T | undefined {
  try {
    const text = storage.getItem(PREFIX + name);
    return text === null ? undefined : (JSON.parse(text) as T);
  } catch {
    return undefined; // it cannot be read
  }
}

function write(storage: Storage, name: string, value: unknown): void {
  try {
    storage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Full, or forbidden: the page works without.
  }
}

/** A signal that is kept. */
function kept<T>(name: string, otherwise: T): Signal<T> {
  const value = signal(read<T>(localStorage, name) ?? otherwise);
  effect(() => write(localStorage, name, value.value));
  return value;
}

/** A signal that each tab keeps for itself, also when it is reloaded. */
function keptByTab<T>(name: string, otherwise: T): Signal<T> {
  const value = signal(read<T>(sessionStorage, name) ?? otherwise);
  effect(() => write(sessionStorage, name, value.value));
  return value;
}

export type Theme = "auto" | "light" | "dark";

export const theme = kept<Theme>("theme", "auto");
export const apiKey = kept("key", "");
export const asksProbabilities = kept("asks-probabilities", true);
export const showsProbabilities = kept("shows-probabilities", false);

/** The id of the open conversation; a new tab begins with the one that was opened last. */
export const openId = keptByTab("open", read<string>(localStorage, "open") ?? "");
effect(() => write(localStorage, "open", openId.value));

/** What is typed and not sent, by conversation; "" is the one without messages. */
export const drafts = keptByTab<Record<string, string>>("drafts", {});

/** The texts attached to it. */
export const draftFiles = keptByTab<Record<string, TextFile[]>>("draft-files", {});

/** The settings of a conversation that has no messages yet. */
export const unsentSetup = keptByTab<Setup | null>("unsent", null);

export const DEFAULTS: Settings = { system: "", params: {}, tools: "", toolChoice: "auto" };
/** What new conversations begin with. */
export const newSettings = kept("new-chats", DEFAULTS);
/** Settings with a name, which belong to a model. */
export interface Preset {
  model: string;
  name: string;
  settings: Settings;
}
export const presets = kept<Preset[]>("presets", []);
export const lastModel = kept("model", "");
