// A conversation: a tree of messages, with one chosen child at each, and pure functions over it.

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

/** Speed of one answer. */
export interface Stats {
  firstTokenMs: number;
  tokensPerSecond: number | null; // after the first token; null: there is only one
  completionTokens: number;
  promptTokens?: number; // unknown until the answer has ended
  cachedTokens?: number;
}

export interface Message {
  id: string;
  parent: string; // ROOT: it begins the conversation
  role: "user" | "assistant" | "tool";
  content: string;
  reasoning?: string;
  toolCalls?: ToolCall[];
  toolCallId?: string; // of a tool's result
  name?: string; // of the tool
  model?: string;
  tokens?: Token[]; // of the whole raw text: reasoning with its tags, content, tool calls
  finish?: string; // why the answer ended; absent: it was stopped, or was written by the user
  stats?: Stats;
  ignored?: string; // the fields of the request that had no effect
  error?: string;
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

/** What a new conversation takes over from the last one. */
export type Setup = Pick<Conversation, "model" | "system" | "params" | "tools" | "toolChoice">;

export const ROOT = "root";
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
  const title = conversation.title || (message.role === "user" ? titleOf(message.content) : "");
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
