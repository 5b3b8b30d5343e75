// What the browser remembers besides conversations, in localStorage.

import { effect, type Signal, signal } from "@preact/signals";
import type { Setup } from "./conversation";

const PREFIX = "genserve.";

/** Read a preference; `otherwise` if it was never set, or cannot be read. */
export function preference<T>(name: string, otherwise: T): T {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? otherwise : (JSON.parse(text) as T);
  } catch {
    return otherwise;
  }
}

export function setPreference(name: string, value: unknown): void {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Full, or forbidden: the page works without.
  }
}

/** A signal that is kept. */
function kept<T>(name: string, otherwise: T): Signal<T> {
  const value = signal(preference(name, otherwise));
  effect(() => setPreference(name, value.value));
  return value;
}

export type Theme = "auto" | "light" | "dark";

export const theme = kept<Theme>("theme", "auto");
export const apiKey = kept("key", "");
export const asksProbabilities = kept("asks-probabilities", true);
export const showsProbabilities = kept("shows-probabilities", false);

const NO_SETUP: Setup = { model: "", system: "", params: {}, tools: "", toolChoice: "auto" };
export const lastSetup = kept<Setup>("setup", NO_SETUP);
