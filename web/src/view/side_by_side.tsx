// Two answers to the same message, of which the reader keeps one.

import { childrenOf, type Message, withBranch } from "../conversation";
import { beside, change, conversation, isBusy } from "../state";
import { IconButton } from "./icons";
import { MessageView } from "./message";

/** The answers to show in place of the last message, if it is one of two. */
export function pairOf(last: Message | undefined): Message[] | null {
  const ids = beside.value;
  if (!ids || !last || !ids.includes(last.id)) return null;
  const siblings = childrenOf(conversation.value, last.parent);
  const pair = ids.map((id) => siblings.find((sibling) => sibling.id === id));
  return pair.every((message) => message !== undefined) ? pair : null;
}

export function SideBySide({ pair }: { pair: Message[] }) {
  const [left, right] = pair;
  const keep = (message: Message) => () => {
    change(conversation.value.id, (old) => withBranch(old, message));
    beside.value = null;
  };
  return (
    <div class="beside" role="group" aria-label="Two answers side by side">
      <IconButton icon="close" label="Show one answer" onClick={() => (beside.value = null)} />
      {pair.map((message) => (
        <section key={message.id} aria-label={titleOf(message, message === left ? right : left)}>
          <h2>{titleOf(message, message === left ? right : left)}</h2>
          <MessageView message={message} isLast={message === right} />
          <button type="button" disabled={isBusy.value} onClick={keep(message)}>
            Go on with this one
          </button>
        </section>
      ))}
    </div>
  );
}

/** What distinguishes an answer from the other: its model, or else its seed. */
function titleOf({ model, request }: Message, other: Message | undefined): string {
  if (model !== other?.model) return model ?? "Written by you";
  const seed = request?.fields.seed;
  return seed === undefined ? "a random seed" : `seed ${seed}`;
}
