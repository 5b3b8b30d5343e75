// The names of tokens without a text of their own: those that end an answer, and other control tokens.

import { signal } from "@preact/signals";
import { detokenize, endToken } from "./api";

const PREFIX = "token_id:"; // how the server names them among log-probabilities

/** By model and token as the server writes it, the token's name in the vocabulary. */
const names = signal<Record<string, string>>({});
const ends = signal<Record<string, string>>({}); // by model

export function isSilent(text: string): boolean {
  return text === "" || text.startsWith(PREFIX);
}

/** The name of a silent token; its number until that is known. */
export function nameOf(model: string, text: string): string {
  const name = names.value[`${model} ${text}`];
  if (name?.includes("\uFFFD")) return "part of a character";
  return name ?? (text ? `token ${text.slice(PREFIX.length)}` : "no text");
}

/** Whether a silent token ends an answer. */
export function isEnd(model: string, text: string): boolean {
  const name = names.value[`${model} ${text}`];
  return name !== undefined && name === ends.value[model];
}

/** Ask the server for the names of silent tokens. */
export async function loadNames(model: string, texts: string[]): Promise<void> {
  const unknown = texts.filter((text) => text.startsWith(PREFIX) && !(`${model} ${text}` in names.value));
  if (!unknown.length) return;
  try {
    ends.value = { ...ends.value, [model]: ends.value[model] ?? (await endToken(model)) };
    for (const text of unknown) {
      const name = await detokenize(model, Number(text.slice(PREFIX.length)));
      names.value = { ...names.value, [`${model} ${text}`]: name };
    }
  } catch {
    // They keep their numbers.
  }
}
