// Export and import of conversations, as files.

import {
  type Conversation,
  type Message,
  newConversation,
  newId,
  path,
  ROOT,
  withMessage,
} from "./conversation";
import { lastModel, newSettings } from "./preferences";

const FORMAT = "genserve-conversations";

/** Let the browser save a file. */
export function download(name: string, type: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function asJson(conversations: Conversation[]): string {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/**
 * The conversations of an exported file, with new ids, or that of OpenAI's messages, which /save of the chat in the
 * terminal writes. Throws an Error that says what is wrong.
 */
export function fromJson(text: string): Conversation[] {
  let file: { format?: string; conversations?: Conversation[]; messages?: unknown };
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const messages = Array.isArray(file) ? file : file?.messages;
  if (Array.isArray(messages) && messages.length && messages.every(isTurn)) return [ofTurns(messages)];
  if (
    file?.format !== FORMAT ||
    !Array.isArray(file.conversations) ||
    !file.conversations.every(isConversation)
  ) {
    throw new Error("The file has neither conversations of this page nor a list of messages with texts.");
  }
  return file.conversations.map((conversation) => ({ ...conversation, id: newId() }));
}

interface Turn {
  role: "system" | "user" | "assistant";
  content: string;
}

function isTurn(value: Turn, index: number): boolean {
  const isKnown = ["user", "assistant"].includes(value?.role) || (value?.role === "system" && index === 0);
  return isKnown && typeof value.content === "string";
}

function ofTurns(turns: Turn[]): Conversation {
  let conversation = newConversation({ ...newSettings.value, model: lastModel.value, system: "" });
  let parent = ROOT;
  for (const { role, content } of turns) {
    if (role === "system") {
      conversation = { ...conversation, system: content };
      continue;
    }
    const id = newId();
    conversation = withMessage(conversation, { id, parent, role, content, created: Date.now() });
    parent = id;
  }
  return conversation;
}

function isConversation(value: Conversation): boolean {
  const texts = [value?.title, value?.system, value?.model, value?.tools, value?.toolChoice];
  const objects = [value?.messages, value?.chosen, value?.params];
  return (
    texts.every((text) => typeof text === "string") &&
    objects.every((object) => typeof object === "object" && object !== null) &&
    typeof value.updated === "number" &&
    Object.values(value.messages).every(isMessage)
  );
}

function isMessage(value: Message): boolean {
  const { id, parent, content, role } = value ?? {};
  const texts = [id, parent, content];
  return texts.every((text) => typeof text === "string") && ["user", "assistant", "tool"].includes(role);
}

const HEADINGS = { user: "User", assistant: "Assistant", tool: "Tool" };

/** The shown branch of a conversation. */
export function asMarkdown(conversation: Conversation): string {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system) parts.push("## System", conversation.system);
  for (const message of path(conversation)) {
    const about = message.role === "tool" ? ` ${message.name}` : message.model ? ` (${message.model})` : "";
    parts.push(`## ${HEADINGS[message.role]}${about}`);
    if (message.reasoning) parts.push(`> ${message.reasoning.replaceAll("\n", "\n> ")}`);
    if (message.content) parts.push(message.content);
    for (const { function: call } of message.toolCalls ?? []) {
      parts.push(`Calls \`${call.name}\`:`, `\`\`\`json\n${call.arguments}\n\`\`\``);
    }
  }
  return `${parts.join("\n\n")}\n`;
}

export function fileName(title: string, extension: string): string {
  const plain = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-");
  return `${plain.replace(/^-|-$/g, "").slice(0, 40) || "conversation"}.${extension}`;
}
