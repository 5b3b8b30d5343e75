// The messages of the shown branch, which scrolls with the answer until the reader scrolls up.

import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { send } from "../answering";
import { conversation, entryOf, isBusy, isConnecting, modelOf, models, serverProblem, shown } from "../state";
import { focusComposer } from "./composer";
import { useFollowing } from "./following";
import { Icon } from "./icons";
import { MessageView } from "./message";
import { pairOf, SideBySide } from "./side_by_side";

export function Thread() {
  const scroller = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const { isAway, follows, toEnd, handlers } = useFollowing(scroller, content);
  const wrote = useRef(false);
  const messages = shown.value;
  const pair = pairOf(messages.at(-1));
  const writes = isBusy.value;
  useLayoutEffect(() => {
    const begins = writes && !wrote.current;
    if (begins || (follows.current && (writes || wrote.current))) toEnd();
    wrote.current = writes;
  }, [messages, writes]);
  useEffect(toEnd, [conversation.value.id]); // another conversation shows its end

  return (
    <div class="thread-area">
      <div
        class="thread"
        ref={scroller}
        {...handlers}
        tabIndex={0}
        role="log"
        aria-label="Messages"
        aria-live="off"
      >
        {messages.length ? (
          <div ref={content}>
            {(pair ? messages.slice(0, -1) : messages).map((message, index) => (
              <MessageView key={message.id} message={message} isLast={index === messages.length - 1} />
            ))}
            {pair && <SideBySide pair={pair} />}
          </div>
        ) : (
          <Empty />
        )}
      </div>
      {isAway && messages.length > 0 && (
        <button
          type="button"
          class="to-end"
          onClick={toEnd}
          aria-label="Scroll to the end"
          title="Scroll to the end"
        >
          <Icon name="down" />
        </button>
      )}
    </div>
  );
}

const EXAMPLES = [
  "What is the capital of Japan?",
  "Explain in one sentence what photosynthesis is.",
  "Tell me a short story about a dragon.",
];

function Empty() {
  const name = modelOf(conversation.value);
  const length = entryOf(conversation.value)?.max_model_len;
  if (serverProblem.value || isConnecting.value || !models.value.length) {
    return <h1 class="only-spoken">genserve</h1>;
  }
  return (
    <div class="welcome">
      <h1>Chat with {name}</h1>
      {length && <p class="faint">Its context has {length.toLocaleString("en")} tokens.</p>}
      <div class="examples">
        {EXAMPLES.map((text) => (
          <button type="button" key={text} onClick={() => send(text) && focusComposer()}>
            {text}
          </button>
        ))}
      </div>
    </div>
  );
}
