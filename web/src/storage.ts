// The conversations that the browser keeps, in IndexedDB, which all tabs with this page share.

import { type DBSchema, type IDBPDatabase, type IDBPTransaction, openDB } from "idb";
import { type Conversation, merged, newId } from "./conversation";

/** An entry of the list of conversations. */
export type Summary = Pick<Conversation, "id" | "title" | "updated"> & {
  revision?: string; // changes with each write, so that a tab sees whether another has written
};

interface Stored extends DBSchema {
  conversations: { key: string; value: Conversation };
  summaries: { key: string; value: Summary }; // so that the list does not load all texts
}

/** The conversations that a tab holds, shown or not. */
export interface Held {
  get: (id: string) => Conversation | undefined;
  set: (conversation: Conversation) => void;
}

/** What this tab has last read or written of each conversation; what it holds is derived from that. */
const known = new Map<string, { conversation: Conversation; revision?: string }>();
const channel = new BroadcastChannel("genserve");

/** Call `onChange` with the id of each conversation that another tab writes or deletes. */
export function listen(onChange: (id: string) => void): void {
  channel.onmessage = (event: MessageEvent<string>) => onChange(event.data);
}

let opened: Promise<IDBPDatabase<Stored>> | undefined;

function database(): Promise<IDBPDatabase<Stored>> {
  opened ??= openDB<Stored>("genserve", 1, {
    upgrade(created) {
      created.createObjectStore("conversations", { keyPath: "id" });
      created.createObjectStore("summaries", { keyPath: "id" });
    },
  });
  return opened;
}

export async function loadSummaries(): Promise<Summary[]> {
  return (await database()).getAll("summaries");
}

export async function loadConversation(id: string): Promise<Conversation | undefined> {
  const transaction = (await database()).transaction(["conversations", "summaries"]);
  const conversation = await transaction.objectStore("conversations").get(id);
  const summary = await transaction.objectStore("summaries").get(id);
  if (conversation) known.set(id, { conversation, revision: summary?.revision });
  return conversation;
}

export async function loadAllConversations(): Promise<Conversation[]> {
  return (await database()).getAll("conversations");
}

export function summaryOf({ id, title, updated }: Conversation): Summary {
  return { id, title, updated };
}

/** Join a held conversation with what other tabs have written. Resolves to false if one has deleted it. */
export async function refreshConversation(id: string, held: Held): Promise<boolean> {
  return join((await database()).transaction(["conversations", "summaries"]), id, held);
}

/** Write a held conversation, joined with what other tabs have written, as `refreshConversation` does. */
export async function saveConversation(id: string, held: Held): Promise<boolean> {
  const transaction = (await database()).transaction(["conversations", "summaries"], "readwrite");
  const remains = await join(transaction, id, held);
  const conversation = held.get(id);
  if (!remains || !conversation) return remains;
  const before = known.get(id);
  const revision = newId();
  transaction.objectStore("conversations").put(conversation);
  transaction.objectStore("summaries").put({ ...summaryOf(conversation), revision });
  known.set(id, { conversation, revision });
  try {
    await transaction.done;
  } catch (error) {
    if (before) known.set(id, before);
    else known.delete(id);
    throw error;
  }
  channel.postMessage(id);
  return true;
}

type Mode = "readonly" | "readwrite";
type Transaction<M extends Mode> = IDBPTransaction<Stored, ("conversations" | "summaries")[], M>;

async function join<M extends Mode>(transaction: Transaction<M>, id: string, held: Held): Promise<boolean> {
  const summary = await transaction.objectStore("summaries").get(id);
  if (!summary) return !known.has(id); // one that was never written is new
  if (summary.revision === known.get(id)?.revision) return true;
  const stored = await transaction.objectStore("conversations").get(id);
  const [base, ours] = [known.get(id)?.conversation, held.get(id)];
  if (!stored || !base || !ours) return true;
  held.set(merged(base, ours, stored));
  known.set(id, { conversation: stored, revision: summary.revision });
  return true;
}

export async function deleteConversation(id: string): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "summaries"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  transaction.objectStore("summaries").delete(id);
  await transaction.done;
  known.delete(id);
  channel.postMessage(id);
}
