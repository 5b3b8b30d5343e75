// Links to the probabilities of an answer, which the browser that has the conversation can open.

import { serverUrl } from "./api";
import type { Message } from "./conversation";
import { showsProbabilities } from "./preferences";
import { conversation, notice, openMessage } from "./state";

const LINK = /^#probabilities\/([^/]+)\/([^/]+)$/;

export function linkTo({ id }: Message): string {
  return `${serverUrl()}#probabilities/${conversation.value.id}/${id}`;
}

/** Show what the address of the page links to, if anything. */
export async function followLink(): Promise<void> {
  const [, id, message] = LINK.exec(location.hash) ?? [];
  if (!id || !message) return;
  history.replaceState(null, "", location.pathname + location.search);
  if (await openMessage(id, message)) showsProbabilities.value = true;
  else notice.value = { text: "This browser does not have the linked conversation: import an export of it." };
}
