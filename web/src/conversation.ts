// A conversation: a tree of messages, with one chosen child at each, and pure functions over it.

import type { JsonObject } from "./schema";

/** A token with the log-probabilities of itself and of the most likely ones at its place. */
export interface Token {
  text: string;
  logprob: number | null;
  top: [text: string, logprob: number][];
  chosen?: true; // by the reader, in place of what the model had sampled
}

export interface ToolCall {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

/** How long the parts of an answer took, as the server measured them. */
export interface Timings {
  queue_ms: number;
  prompt_n: number; // tokens of the prompt that were computed
  prompt_ms: number;
  cache_n: number; // tokens of the prompt that were in the prefix cache
  predicted_n: number;
  predicted_ms: number;
  predicted_per_second: number; // 0: there is only one
  draft_n?: number;
  draft_n_accepted?: number;
}

/** How far the prompt was the same as one in the prefix cache, and the texts where they differ. */
export interface CacheMatch {
  matched_n: number;
  end: "different" | "unknown" | "complete" | "off";
  prompt?: { text: string };
  cached?: { text: string };
}

/** A text that is sent with a message. */
export interface TextFile {
  name: string;
  text: string;
}

/** Speed of one answer. */
export interface Stats {
  firstTokenMs: number;
  tokensPerSecond: number | null; // after the first token; null: there is only one
  completionTokens: number;
  promptTokens?: number; // unknown until the answer has ended
  cachedTokens?: number;
  timings?: Timings;
  cacheMatch?: CacheMatch;
}

/** A request without the messages of the conversation, as it is kept with the answer. */
export interface ChatRequest {
  system: string;
  prefix: string; // the raw text that the answer begins with; empty: the model begins it
  fields: JsonObject;
}

export interface Message {
  id: string;
  parent: string; // ROOT: it begins the conversation
  role: "user" | "assistant" | "tool";
  content: string; // of a message with files: with their texts, as it is sent
  typed?: string; // of a message with files: without them
  files?: TextFile[];
  reasoning?: string;
  toolCalls?: ToolCall[];
  toolCallId?: string; // of a tool's result
  name?: string; // of the tool
  model?: string;
  tokens?: Token[]; // of the whole raw text: reasoning with its tags, content, tool calls
  stopReason?: string; // the stop string, or whatever else stopped it
  finish?: string; // why the answer ended, UNFINISHED until then; absent: it was written by the user
  stats?: Stats;
  request?: ChatRequest; // of which it is the answer
  ignored?: string; // the fields of the request that had no effect
  error?: string;
  errorKind?: string; // one that the page has advice for
  created: number;
}

export interface Conversation {
  id: string;
  title: string;
  updated: number;
  model: string;
  system: string;
  params: Record<string, unknown>; // fields of the request that are not at the server's default
  tools: string; // JSON, as it was typed
  toolChoice: string;
  messages: Record<string, Message>;
  chosen: Record<string, string>; // by the id of a parent, the child that is shown
}

/** The settings of a conversation, and its model. */
export type Settings = Pick<Conversation, "system" | "params" | "tools" | "toolChoice">;
export type Setup = Settings & Pick<Conversation, "model">;

export const ROOT = "root";
/** An answer that is being written, or that a reload or an error has cut off. */
export const UNFINISHED = "unfinished";
const TITLE_CHARS = 60;

export function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(36)).join("");
}

export function newConversation(setup: Setup): Conversation {
  return { ...setup, id: newId(), title: "", updated: Date.now(), messages: {}, chosen: {} };
}

/** The children of a message, the oldest first. */
export function childrenOf(conversation: Conversation, parent: string): Message[] {
  const children = Object.values(conversation.messages).filter((message) => message.parent === parent);
  return children.sort((one, other) => one.created - other.created);
}

/** The messages that are shown, from the first to the last. */
export function path(conversation: Conversation): Message[] {
  const shown: Message[] = [];
  for (let parent = ROOT; ; ) {
    const message = conversation.messages[conversation.chosen[parent] ?? ""];
    if (!message) return shown;
    shown.push(message);
    parent = message.id;
  }
}

/** Show a message, wherever it is in the tree. */
export function withShown(conversation: Conversation, id: string): Conversation {
  const chosen = { ...conversation.chosen };
  for (const message of pathTo(conversation, id)) chosen[message.parent] = message.id;
  return { ...conversation, chosen };
}

/** The messages before and including one. */
export function pathTo(conversation: Conversation, id: string): Message[] {
  const before: Message[] = [];
  for (let message = conversation.messages[id]; message; message = conversation.messages[message.parent]) {
    before.unshift(message);
  }
  return before;
}

/** Add a message, and show it. */
export function withMessage(conversation: Conversation, message: Message): Conversation {
  const words = message.typed || message.files?.[0]?.name || message.content;
  const title = conversation.title || (message.role === "user" ? titleOf(words) : "");
  return {
    ...conversation,
    title,
    updated: Date.now(),
    messages: { ...conversation.messages, [message.id]: message },
    chosen: { ...conversation.chosen, [message.parent]: message.id },
  };
}

/** Change fields of a message. */
export function withChange(conversation: Conversation, id: string, change: Partial<Message>): Conversation {
  const message = conversation.messages[id];
  if (!message) return conversation; // it was deleted meanwhile
  return { ...conversation, messages: { ...conversation.messages, [id]: { ...message, ...change } } };
}

/** Show another child of a message's parent. */
export function withBranch(conversation: Conversation, message: Message): Conversation {
  return { ...conversation, chosen: { ...conversation.chosen, [message.parent]: message.id } };
}

/** Remove a message and all that follow it, in all branches. */
export function withoutMessage(conversation: Conversation, id: string): Conversation {
  const removed = conversation.messages[id];
  if (!removed) return conversation;
  const siblings = childrenOf(conversation, removed.parent);
  const place = siblings.findIndex((sibling) => sibling.id === id);
  const next = siblings[place - 1] ?? siblings[place + 1];
  const messages = { ...conversation.messages };
  const chosen = { ...conversation.chosen };
  const remove = (gone: string) => {
    for (const child of childrenOf(conversation, gone)) remove(child.id);
    delete messages[gone];
    delete chosen[gone];
  };
  remove(id);
  if (next) chosen[removed.parent] = next.id;
  else delete chosen[removed.parent];
  return { ...conversation, messages, chosen, updated: Date.now() };
}

/** Undo `withoutMessage`: bring back what it removed, and keep what was added since. */
export function withRestored(conversation: Conversation, before: Conversation): Conversation {
  return {
    ...conversation,
    messages: { ...before.messages, ...conversation.messages },
    chosen: { ...conversation.chosen, ...before.chosen },
  };
}

/**
 * Join what two tabs have made of a conversation since both had `base`.
 *
 * A message that one of them has deleted is gone, unless the other has written behind it. Each tab goes on
 * showing its own branches.
 */
export function merged(base: Conversation, ours: Conversation, theirs: Conversation): Conversation {
  const messages: Record<string, Message> = {};
  for (const id of Object.keys({ ...theirs.messages, ...ours.messages })) {
    const [old, our, their] = [base.messages[id], ours.messages[id], theirs.messages[id]];
    const isDeleted = old && !(our && their);
    const latest = our && our !== old ? our : (their ?? our);
    if (latest && !isDeleted) messages[id] = latest;
  }
  for (let { parent } of Object.values(messages)) {
    for (; parent !== ROOT && !(parent in messages); parent = messages[parent]?.parent ?? ROOT) {
      const deleted = ours.messages[parent] ?? theirs.messages[parent];
      if (deleted) messages[parent] = deleted;
    }
  }
  const chosen: Record<string, string> = {};
  for (const { id, parent } of Object.values(messages)) {
    const choices = [ours.chosen[parent], theirs.chosen[parent], id];
    chosen[parent] ??= choices.find((choice) => choice !== undefined && choice in messages) ?? id;
  }
  const of = <K extends keyof Setup | "title">(name: K) =>
    ours[name] === base[name] ? theirs[name] : ours[name];
  return {
    id: ours.id,
    title: of("title"),
    updated: Math.max(ours.updated, theirs.updated),
    model: of("model"),
    system: of("system"),
    params: of("params"),
    tools: of("tools"),
    toolChoice: of("toolChoice"),
    messages,
    chosen,
  };
}

/** The text that is sent of a message with files: the files in code blocks, then what was typed. */
export function withFiles(typed: string, files: TextFile[]): string {
  const blocks = files.map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
    return `File ${name}:\n${fence}\n${text.replace(/\n?$/, "\n")}${fence}`;
  });
  return [...blocks, typed].filter(Boolean).join("\n\n");
}

/** How many characters messages have. */
export function numChars(messages: Message[]): number {
  return messages.reduce((sum, { content, reasoning = "" }) => sum + content.length + reasoning.length, 0);
}

/** The newest turns, as many as have at most a number of characters. */
export function newestTurns(messages: Message[], maxChars: number): Message[] {
  let start = messages.length;
  for (let index = start - 1; index >= 0 && numChars(messages.slice(index)) <= maxChars; index--) {
    if (messages[index]?.role === "user") start = index;
  }
  return messages.slice(start);
}

function titleOf(text: string): string {
  const line = text.trim().split("\n")[0] ?? "";
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS).trimEnd()}…` : line;
}

const [START, END] = ["<think>", "</think>"];

/** Split a raw text into reasoning and content, as the server does. */
export function separated(raw: string): Pick<Message, "reasoning" | "content"> {
  const text = raw.trimStart();
  if (!text.startsWith(START)) return { content: raw };
  const [reasoning = "", ...rest] = text.slice(START.length).split(END);
  return { reasoning: reasoning.trim(), content: rest.join(END).trimStart() };
}

/** Whether a raw text ends within its reasoning. */
export function isThinking(raw: string): boolean {
  return raw.trimStart().startsWith(START) && !raw.includes(END);
}

/** The raw text of an answer: up to a token, or the whole. */
export function rawText(message: Message, numTokens?: number): string {
  const thought = message.reasoning ? `${START}\n${message.reasoning}` : "";
  if (!message.tokens) {
    const closed = message.content ? `\n${END}\n\n` : "";
    return thought ? `${thought}${closed}${message.content}` : message.content;
  }
  const text = message.tokens
    .slice(0, numTokens)
    .map((token) => token.text)
    .join("");
  // Some templates begin the thought themselves.
  return thought && !text.trimStart().startsWith(START) ? `${START}\n${text}` : text;
}
