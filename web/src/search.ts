// Search in the titles and the messages of all conversations.

import type { Conversation } from "./conversation";

/** A place where the words of a query are. */
export interface Hit {
  id: string; // of the conversation
  title: string;
  message: string; // its id; empty: the title has the words
  before: string;
  match: string;
  after: string;
}

const MAX_HITS = 50;
const MAX_PER_CONVERSATION = 3;
const BEFORE_CHARS = 20;
const AFTER_CHARS = 60;

export function search(conversations: Conversation[], words: string): Hit[] {
  const sought = words.toLowerCase();
  const newest = [...conversations].sort((one, other) => other.updated - one.updated);
  return newest.flatMap((conversation) => ofConversation(conversation, sought)).slice(0, MAX_HITS);
}

function ofConversation({ id, title, messages }: Conversation, sought: string): Hit[] {
  const hits: Hit[] = [];
  const oldest = Object.values(messages).sort((one, other) => one.created - other.created);
  for (const message of oldest) {
    const text = `${message.reasoning ?? ""}\n${message.content}`;
    const at = text.toLowerCase().indexOf(sought);
    if (at < 0) continue;
    const end = at + sought.length;
    hits.push({
      id,
      title,
      message: message.id,
      before: (at > BEFORE_CHARS ? "…" : "") + text.slice(Math.max(0, at - BEFORE_CHARS), at),
      match: text.slice(at, end),
      after: text.slice(end, end + AFTER_CHARS),
    });
    if (hits.length === MAX_PER_CONVERSATION) break;
  }
  const inTitle = title.toLowerCase().includes(sought);
  if (inTitle && !hits.length) hits.push({ id, title, message: "", before: "", match: "", after: "" });
  return hits;
}
