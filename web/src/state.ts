// The page's state, as signals; views read them, and the functions here change them.

import { computed, effect, signal } from "@preact/signals";
import { ApiError, listModels, loadOnDemand, type Model, needsKey, openApi } from "./api";
import {
  type Conversation,
  type Message,
  newConversation,
  newId,
  path,
  ROOT,
  type Setup,
  withMessage,
  withoutMessage,
  withRestored,
  withShown,
} from "./conversation";
import { lastModel, newSettings, openId, unsentSetup } from "./preferences";
import { chatFields, type Field, type JsonObject } from "./schema";
import * as storage from "./storage";

export type DialogName = "" | "key" | "shortcuts" | "raw" | "delete" | "compare" | "models";

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
export const hasKeyProblem = signal(false); // the server wants a key, or another
export const isConnecting = signal(true);
/** Whether the last request was not sent, since the tools in the settings are not valid. */
export const isRefused = signal(false);

export const summaries = signal<storage.Summary[]>([]);
export const conversation = signal<Conversation>(newConversation(unsentSetup.value ?? setupOfNew()));
export const shown = computed(() => path(conversation.value));
effect(() => {
  const hasMessages = Object.keys(conversation.value.messages).length > 0;
  unsentSetup.value = hasMessages ? null : setupOf(conversation.value);
});

/** The answers being written, by conversation; each stops by its controller. */
export const running = signal<Record<string, AbortController>>({});
/** The server's ids of answers, by the ids of their messages. */
export const answerIds = signal<Record<string, string>>({});
/** Two answers to the same message that are shown side by side. */
export const beside = signal<[left: string, right: string] | null>(null);
/** The share of an answer's prompt that the model has read, 0 to 1, by the id of its message. */
export const readShares = signal<Record<string, number>>({});
export const isBusy = computed(() => conversation.value.id in running.value);

/** Close the panels that cover the conversation. */
export function closeCoveringPanels(): void {
  sidebarOpen.value &&= isWide.matches;
  settingsOpen.value &&= isWide.matches;
}

// Conversations that are answered or wait to be written, while another is shown.
const background = new Map<string, Conversation>();
const held: storage.Held = {
  get: (id) => (id === conversation.value.id ? conversation.value : background.get(id)),
  set: (edited) => {
    if (edited.id === conversation.value.id) conversation.value = edited;
    else background.set(edited.id, edited);
  },
};

/** Ask the server for its models and fields. */
export async function connect(): Promise<void> {
  try {
    models.value = await listModels();
    if (!fields.value.length) fields.value = chatFields(await openApi());
    serverProblem.value = "";
    hasKeyProblem.value = false;
    needsKey.value = false;
  } catch (error) {
    serverProblem.value = (error as Error).message;
    hasKeyProblem.value = error instanceof ApiError && error.status === 401;
  }
  isConnecting.value = false;
}

/** The model of a conversation: its own if the server has it, else the first. */
export function modelOf({ model }: Pick<Setup, "model">): string {
  return models.value.some(({ id }) => id === model) ? model : (models.value[0]?.id ?? model);
}

/** Whether a model is on demand, and not loaded as far as the page knows. */
export function isUnloaded(name: string): boolean {
  const status = models.value.find(({ id }) => id === name)?.status;
  return status !== undefined && status.value !== "loaded";
}

/** Have a model on demand loaded, which tells its defaults. */
export async function load(name: string, signal: AbortSignal): Promise<void> {
  await loadOnDemand(name, signal);
  await connect();
}

/** What the server says of the model of a conversation; undefined: it has no model. */
export function entryOf(setup: Pick<Setup, "model">): Model | undefined {
  return models.value.find(({ id }) => id === modelOf(setup));
}

/** The default of a field: the model's own, else the chat's, else the server's. */
export function defaultOf(setup: Setup, field: Field): { value: unknown; isOfModel: boolean } {
  const model = entryOf(setup);
  const own = model?.default_sampling_params?.[field.name];
  return { value: own ?? chatParams(setup)[field.name] ?? field.default, isOfModel: own !== undefined };
}

/** The sampling parameters of a chat that sets none, by the model. */
export function chatParams(setup: Pick<Setup, "model">): JsonObject {
  return entryOf(setup)?.chat_sampling_params ?? {};
}

/** Change a conversation, shown or not, and keep it. */
export function change(id: string, edit: (old: Conversation) => Conversation): void {
  const old = held.get(id);
  if (!old) return; // it was deleted meanwhile
  const edited = edit(old);
  held.set(edited);
  if (Object.keys(edited.messages).length) save(edited);
}

/** Change the settings of the shown conversation. */
export function changeSetup(setup: Partial<Setup>): void {
  change(conversation.value.id, (old) => ({ ...old, ...setup }));
  if (setup.model) lastModel.value = setup.model;
}

function setupOf({ model, system, params, tools, toolChoice }: Setup): Setup {
  return { model, system, params, tools, toolChoice };
}

function setupOfNew(): Setup {
  return { ...newSettings.value, model: lastModel.value };
}

/** Delete a message and what follows it; a notice offers to undo that. */
export function deleteMessage(message: Message): void {
  const before = conversation.value;
  change(before.id, (old) => withoutMessage(old, message.id));
  const undo = () => change(before.id, (old) => withRestored(old, before));
  notice.value = { text: "The branch was deleted.", undo };
}

export function startConversation(): void {
  leave();
  conversation.value = newConversation(setupOfNew());
}

/** Begin a conversation with the settings of the shown one, and some of its messages. */
export function continueInNewChat(messages: Message[]): void {
  const setup = setupOf(conversation.value);
  startConversation();
  let parent = ROOT;
  for (const message of messages) {
    const copy = { ...message, id: newId(), parent };
    change(conversation.value.id, (old) => withMessage({ ...old, ...setup }, copy));
    parent = copy.id;
  }
}

export async function openConversation(id: string): Promise<void> {
  if (id === conversation.value.id) return;
  const found = background.get(id) ?? (await storage.loadConversation(id));
  if (!found) return;
  leave();
  background.delete(id);
  conversation.value = found;
  openId.value = id;
}

/** Open a conversation at a message; resolves to false if this browser does not have it. */
export async function openMessage(id: string, message: string): Promise<boolean> {
  await openConversation(id);
  if (conversation.value.id !== id) return false;
  if (!(message in conversation.value.messages)) return !message;
  conversation.value = withShown(conversation.value, message);
  requestAnimationFrame(() => {
    const element = document.getElementById(`message-${message}`);
    element?.scrollIntoView({ block: "start" });
    element?.focus({ preventScroll: true });
  });
  return true;
}

export async function renameConversation(id: string, title: string): Promise<void> {
  if (!held.get(id)) {
    const found = await storage.loadConversation(id);
    if (found) held.set(found);
  }
  change(id, (old) => ({ ...old, title }));
}

export async function removeConversation(id: string): Promise<void> {
  forget(id);
  await storage.deleteConversation(id);
  await loadSummaries(); // one that was under way, for a change of another tab, has put it back
}

/** Add conversations from a file, and show the first. */
export async function addConversations(added: Conversation[]): Promise<void> {
  for (const one of added) {
    held.set(one);
    save(one);
  }
  await flush();
  if (added[0]) await openConversation(added[0].id);
}

/** Load the list, and the conversation that was open last; follow what other tabs change. */
export async function restore(): Promise<void> {
  storage.listen((id) => {
    if (!document.hidden) refresh([id]);
  });
  await loadSummaries();
  if (openId.value) await openConversation(openId.value);
}

/** Take over what other tabs have changed in the conversations of this one. */
export async function refresh(ids = [conversation.value.id, ...background.keys()]): Promise<void> {
  for (const id of ids) {
    if (held.get(id) && !(await storage.refreshConversation(id, held))) lose(id);
  }
  await loadSummaries();
}

async function loadSummaries(): Promise<void> {
  const stored = (await storage.loadSummaries()).filter(({ id }) => !pending.has(id));
  const edited = summaries.value.filter(({ id }) => pending.has(id));
  summaries.value = [...edited, ...stored].sort(newestFirst);
}

/** Drop a conversation that another tab has deleted. */
function lose(id: string): void {
  if (id === conversation.value.id) notice.value = { text: "This conversation was deleted in another tab." };
  forget(id);
}

function forget(id: string): void {
  running.value[id]?.abort();
  background.delete(id);
  pending.delete(id);
  summaries.value = summaries.value.filter((summary) => summary.id !== id);
  if (id === conversation.value.id) conversation.value = newConversation(setupOfNew());
}

function leave(): void {
  const left = conversation.value;
  if (left.id in running.value || pending.has(left.id)) background.set(left.id, left);
  openId.value = "";
}

const SAVE_MS = 300;
const pending = new Set<string>(); // what waits to be written

/** Keep a conversation soon; a streamed answer would otherwise be written at each token. */
function save(edited: Conversation): void {
  if (!pending.size) setTimeout(flush, SAVE_MS);
  pending.add(edited.id);
  if (edited.id === conversation.value.id) openId.value = edited.id;
  const known = summaries.value.find(({ id }) => id === edited.id);
  if (known?.title === edited.title && known.updated === edited.updated) return;
  const others = summaries.value.filter(({ id }) => id !== edited.id);
  summaries.value = [storage.summaryOf(edited), ...others].sort(newestFirst);
}

/** Write what waits to be kept. */
export async function flush(): Promise<void> {
  const ids = [...pending];
  pending.clear();
  await Promise.all(
    ids.map(async (id) => {
      try {
        if (!(await storage.saveConversation(id, held))) lose(id);
      } catch {
        notice.value = { text: "The browser could not save this conversation: export it to keep it." };
      }
    }),
  );
}

function newestFirst(one: storage.Summary, other: storage.Summary): number {
  return other.updated - one.updated;
}
