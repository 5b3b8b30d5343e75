// The page's state, as signals; views read them, and the functions here change them.

import { computed, signal } from "@preact/signals";
import { listModels, type Model, needsKey, openApi } from "./api";
import {
  type Conversation,
  type Message,
  newConversation,
  path,
  type Setup,
  withoutMessage,
} from "./conversation";
import { lastSetup, preference, setPreference } from "./preferences";
import { chatFields, type Field, type JsonObject } from "./schema";
import * as storage from "./storage";

export type DialogName = "" | "key" | "shortcuts" | "raw" | "delete";

export const dialog = signal<DialogName>("");
export const dialogSubject = signal(""); // the id of what the dialog is about
const isWide = matchMedia("(min-width: 60rem)");
export const sidebarOpen = signal(isWide.matches);
export const settingsOpen = signal(false);
isWide.addEventListener("change", () => {
  sidebarOpen.value = isWide.matches; // a narrow page is covered by its panels
  settingsOpen.value &&= isWide.matches;
});
/** A short message that disappears by itself, and how to undo what it reports. */
export const notice = signal<{ text: string; undo?: () => void } | null>(null);

export const models = signal<Model[]>([]);
export const fields = signal<Field[]>([]);
export const serverProblem = signal("");
export const isConnecting = signal(true);

export const summaries = signal<storage.Summary[]>([]);
export const conversation = signal<Conversation>(newConversation(lastSetup.value));
export const shown = computed(() => path(conversation.value));

/** The answers being written, by conversation; each stops by its controller. */
export const running = signal<Record<string, AbortController>>({});
export const isBusy = computed(() => conversation.value.id in running.value);

/** Close the panels that cover the conversation. */
export function closeCoveringPanels(): void {
  sidebarOpen.value &&= isWide.matches;
  settingsOpen.value &&= isWide.matches;
}

// Conversations that are written while another is shown.
const background = new Map<string, Conversation>();

/** Ask the server for its models and fields. */
export async function connect(): Promise<void> {
  try {
    models.value = await listModels();
    if (!fields.value.length) fields.value = chatFields(await openApi());
    serverProblem.value = "";
    needsKey.value = false;
  } catch (error) {
    serverProblem.value = (error as Error).message;
  }
  isConnecting.value = false;
}

/** The model of a conversation: its own if the server has it, else the first. */
export function modelOf({ model }: Pick<Setup, "model">): string {
  return models.value.some(({ id }) => id === model) ? model : (models.value[0]?.id ?? model);
}

/** The default of a field: the model's own, else the chat's, else the server's. */
export function defaultOf(setup: Setup, field: Field): { value: unknown; isOfModel: boolean } {
  const model = models.value.find(({ id }) => id === modelOf(setup));
  const own = model?.default_sampling_params?.[field.name];
  return { value: own ?? chatParams(setup)[field.name] ?? field.default, isOfModel: own !== undefined };
}

/** The sampling parameters of a chat that sets none, by the model. */
export function chatParams(setup: Pick<Setup, "model">): JsonObject {
  return models.value.find(({ id }) => id === modelOf(setup))?.chat_sampling_params ?? {};
}

/** Change a conversation, shown or not, and keep it. */
export function change(id: string, edit: (old: Conversation) => Conversation): void {
  const old = id === conversation.value.id ? conversation.value : background.get(id);
  if (!old) return; // it was deleted meanwhile
  const edited = edit(old);
  if (id === conversation.value.id) conversation.value = edited;
  else background.set(id, edited);
  if (Object.keys(edited.messages).length) save(edited);
}

/** Change the settings of the shown conversation; the next new one has them too. */
export function changeSetup(setup: Partial<Setup>): void {
  change(conversation.value.id, (old) => ({ ...old, ...setup }));
  const { model, system, params, tools, toolChoice } = conversation.value;
  lastSetup.value = { model, system, params, tools, toolChoice };
}

/** Delete a message and what follows it; a notice offers to undo that. */
export function deleteMessage(message: Message): void {
  const before = conversation.value;
  change(before.id, (old) => withoutMessage(old, message.id));
  const undo = () => change(before.id, ({ title }) => ({ ...before, title }));
  notice.value = { text: "The branch was deleted.", undo };
}

export function startConversation(): void {
  leave();
  conversation.value = newConversation(lastSetup.value);
}

export async function openConversation(id: string): Promise<void> {
  if (id === conversation.value.id) return;
  const found = background.get(id) ?? pending.get(id) ?? (await storage.loadConversation(id));
  if (!found) return;
  leave();
  background.delete(id);
  conversation.value = found;
  setPreference("open", id);
}

export async function renameConversation(id: string, title: string): Promise<void> {
  const isOpen = id === conversation.value.id || background.has(id);
  if (isOpen) return change(id, (old) => ({ ...old, title }));
  const found = pending.get(id) ?? (await storage.loadConversation(id));
  if (found) save({ ...found, title });
}

export async function removeConversation(id: string): Promise<void> {
  running.value[id]?.abort();
  background.delete(id);
  pending.delete(id);
  summaries.value = summaries.value.filter((summary) => summary.id !== id);
  if (id === conversation.value.id) conversation.value = newConversation(lastSetup.value);
  await storage.deleteConversation(id);
}

/** Add conversations from a file, and show the first. */
export async function addConversations(added: Conversation[]): Promise<void> {
  for (const one of added) await storage.saveConversation(one);
  await loadSummaries();
  if (added[0]) await openConversation(added[0].id);
}

/** Load the list, and the conversation that was open last. */
export async function restore(): Promise<void> {
  await loadSummaries();
  const open = preference("open", "");
  if (open) await openConversation(open);
}

async function loadSummaries(): Promise<void> {
  summaries.value = (await storage.loadSummaries()).sort(newestFirst);
}

function leave(): void {
  const left = conversation.value;
  if (left.id in running.value) background.set(left.id, left);
  setPreference("open", "");
}

const SAVE_MS = 300;
const pending = new Map<string, Conversation>();

/** Keep a conversation soon; a streamed answer would otherwise be written at each token. */
function save(edited: Conversation): void {
  if (!pending.size) setTimeout(flush, SAVE_MS);
  pending.set(edited.id, edited);
  if (edited.id === conversation.value.id) setPreference("open", edited.id);
  const known = summaries.value.find(({ id }) => id === edited.id);
  if (known?.title === edited.title && known.updated === edited.updated) return;
  const others = summaries.value.filter(({ id }) => id !== edited.id);
  summaries.value = [storage.summaryOf(edited), ...others].sort(newestFirst);
}

/** Write what waits to be kept. */
export function flush(): void {
  for (const one of pending.values()) {
    storage.saveConversation(one).catch(() => {
      notice.value = { text: "The browser could not save this conversation: export it to keep it." };
    });
  }
  pending.clear();
}

function newestFirst(one: storage.Summary, other: storage.Summary): number {
  return other.updated - one.updated;
}
