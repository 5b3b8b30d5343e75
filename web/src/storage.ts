// The conversations that the browser keeps, in IndexedDB.

import { type DBSchema, type IDBPDatabase, openDB } from "idb";
import type { Conversation } from "./conversation";

/** An entry of the list of conversations. */
export type Summary = Pick<Conversation, "id" | "title" | "updated">;

interface Stored extends DBSchema {
  conversations: { key: string; value: Conversation };
  summaries: { key: string; value: Summary }; // so that the list does not load all texts
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
  return (await database()).get("conversations", id);
}

export async function loadAllConversations(): Promise<Conversation[]> {
  return (await database()).getAll("conversations");
}

export function summaryOf({ id, title, updated }: Conversation): Summary {
  return { id, title, updated };
}

export async function saveConversation(conversation: Conversation): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "summaries"], "readwrite");
  transaction.objectStore("conversations").put(conversation);
  transaction.objectStore("summaries").put(summaryOf(conversation));
  await transaction.done;
}

export async function deleteConversation(id: string): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "summaries"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  transaction.objectStore("summaries").delete(id);
  await transaction.done;
}
