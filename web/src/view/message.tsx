// One message of the shown branch, with its actions.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { continueAnswer, regenerate, resend } from "../answering";
import { childrenOf, type Message, withBranch } from "../conversation";
import { CopyButton, Markdown } from "../markdown";
import { showsProbabilities } from "../preferences";
import { change, conversation, deleteMessage, dialog, dialogSubject, isBusy, models } from "../state";
import { IconButton } from "./icons";
import { TokenView } from "./token_view";
import { ToolCalls } from "./tool_calls";

interface MessageProps {
  message: Message;
  isLast: boolean;
}

export function MessageView({ message, isLast }: MessageProps) {
  const [edits, setEdits] = useState(false);
  if (edits) return <Editor message={message} onDone={() => setEdits(false)} />;
  const isWriting = isLast && isBusy.value && message.role === "assistant";
  return (
    <article class={`message ${message.role}`} aria-label={LABELS[message.role]} aria-busy={isWriting}>
      {message.role === "assistant" ? (
        <Answer message={message} isWriting={isWriting} isLast={isLast} />
      ) : message.role === "tool" ? (
        <ToolResult message={message} />
      ) : (
        <div class="bubble">{message.content}</div>
      )}
      <footer>
        {!isWriting && (
          <>
            <Branches message={message} />
            <Actions message={message} isLast={isLast} onEdit={() => setEdits(true)} />
          </>
        )}
        {message.stats && <Speed message={message} />}
      </footer>
    </article>
  );
}

const LABELS = { user: "You", assistant: "Assistant", tool: "Tool result" };

interface AnswerProps extends MessageProps {
  isWriting: boolean;
}

function Answer({ message, isWriting, isLast }: AnswerProps) {
  const { content, reasoning, toolCalls, tokens, error } = message;
  const isEmpty = !content && !reasoning && !toolCalls?.length;
  return (
    <>
      {showsProbabilities.value && tokens?.length ? (
        <TokenView message={message} tokens={tokens} />
      ) : (
        <>
          {reasoning && <Reasoning text={reasoning} isOpen={isWriting && !content} />}
          {content && <Markdown text={content} />}
        </>
      )}
      {showsProbabilities.value && !tokens?.length && !isEmpty && !isWriting && (
        <p class="faint">This answer has no token probabilities: it was generated without them.</p>
      )}
      {toolCalls && toolCalls.length > 0 && (
        <ToolCalls calls={toolCalls} isPending={isLast && !isWriting && !error} />
      )}
      {isWriting && isEmpty && (
        <p class="waiting" role="status" aria-label="Waiting for the first token">
          <i />
          <i />
          <i />
        </p>
      )}
      {!isWriting && isEmpty && !error && <p class="faint">The answer is empty.</p>}
      {error && (
        <div class="error" role="alert">
          <p>{error}</p>
          <button type="button" onClick={() => regenerate(message)}>
            Try again
          </button>
        </div>
      )}
    </>
  );
}

/** The thought before an answer; open only while nothing else is there, unless the reader opened it. */
function Reasoning({ text, isOpen }: { text: string; isOpen: boolean }) {
  const [wanted, setWanted] = useState<boolean | null>(null);
  return (
    <details class="reasoning" open={wanted ?? isOpen}>
      <summary
        onClick={(event) => {
          event.preventDefault();
          setWanted(!(wanted ?? isOpen));
        }}
      >
        {isOpen ? "Thinking…" : "Reasoning"}
      </summary>
      <Markdown text={text} />
    </details>
  );
}

function ToolResult({ message }: { message: Message }) {
  return (
    <details class="tool-card" open>
      <summary>
        Result of <code>{message.name}</code>
      </summary>
      <pre>{message.content}</pre>
    </details>
  );
}

/** `‹ 2/3 ›`: the alternatives to a message. */
function Branches({ message }: { message: Message }) {
  const { value } = conversation;
  const siblings = childrenOf(value, message.parent);
  if (siblings.length < 2) return null;
  const at = siblings.findIndex(({ id }) => id === message.id);
  const show = (sibling: Message | undefined) => () => {
    if (sibling) change(value.id, (old) => withBranch(old, sibling));
  };
  const [before, after] = [siblings[at - 1], siblings[at + 1]];
  return (
    <span class="branches" role="group" aria-label="Branches">
      <IconButton
        icon="left"
        label="Previous branch"
        disabled={!before || isBusy.value}
        onClick={show(before)}
      />
      <span>
        {at + 1}/{siblings.length}
      </span>
      <IconButton icon="right" label="Next branch" disabled={!after || isBusy.value} onClick={show(after)} />
    </span>
  );
}

interface ActionsProps extends MessageProps {
  onEdit: () => void;
}

function Actions({ message, isLast, onEdit }: ActionsProps) {
  const isAnswer = message.role === "assistant";
  const hasText = Boolean(message.content || message.reasoning);
  const canContinue =
    isAnswer && isLast && hasText && message.finish !== "stop" && message.finish !== "tool_calls";
  const raw = () => {
    dialogSubject.value = message.id;
    dialog.value = "raw";
  };
  return (
    <span class="actions">
      {message.content && <CopyButton text={message.content} />}
      <IconButton icon="edit" label="Edit" disabled={isBusy.value} onClick={onEdit} />
      {isAnswer && (
        <IconButton
          icon="again"
          label="Regenerate"
          disabled={isBusy.value}
          onClick={() => regenerate(message)}
        />
      )}
      {canContinue && (
        <IconButton
          icon="forward"
          label="Continue"
          disabled={isBusy.value}
          onClick={() => continueAnswer(message)}
        />
      )}
      {isAnswer && message.tokens?.length ? (
        <IconButton
          icon="chart"
          label="Token probabilities"
          keys="Alt+P"
          pressed={showsProbabilities.value}
          onClick={() => (showsProbabilities.value = !showsProbabilities.value)}
        />
      ) : null}
      {isAnswer && <IconButton icon="code" label="Request as curl and Python" onClick={raw} />}
      <IconButton
        icon="trash"
        label="Delete this branch"
        disabled={isBusy.value}
        onClick={() => deleteMessage(message)}
      />
    </span>
  );
}

const ENDINGS: Record<string, string> = {
  length: "reached the limit of tokens",
  stopped: "stopped",
  repetition: "stopped, since it repeated itself",
};

/** The speed of an answer, and how it ended. */
function Speed({ message }: { message: Message }) {
  const text = useMemo(() => {
    const { stats, finish, ignored } = message;
    if (!stats) return "";
    const speed = stats.tokensPerSecond === null ? "" : `${stats.tokensPerSecond.toFixed(1)} tokens/s`;
    const parts = [
      models.value.length > 1 && message.model,
      speed,
      `first token ${Math.round(stats.firstTokenMs)} ms`,
      `${stats.completionTokens} tokens`,
      ENDINGS[finish ?? ""] ?? "",
      ignored && `without effect: ${ignored}`,
    ];
    return parts.filter(Boolean).join(" · ");
  }, [message, models.value.length]);
  const { promptTokens, cachedTokens = 0 } = message.stats ?? {};
  const prompt =
    promptTokens && `${promptTokens} tokens in the prompt, ${cachedTokens} of them from the prefix cache`;
  return (
    <span class="speed" title={prompt || undefined}>
      {text}
    </span>
  );
}

/** The form that changes a message, as another branch; a user's message is answered again. */
function Editor({ message, onDone }: { message: Message; onDone: () => void }) {
  const [text, setText] = useState(message.content);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const isUser = message.role === "user";
  const done = () => {
    onDone();
    resend(message, text);
  };
  return (
    <article class={`message ${message.role} editing`}>
      <textarea
        aria-label="Edit the message"
        value={text}
        ref={area}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") onDone();
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done();
          event.stopPropagation();
        }}
      />
      <div class="buttons">
        <button type="button" onClick={onDone}>
          Cancel
        </button>
        <button type="button" class="primary" disabled={!text.trim()} onClick={done}>
          {isUser ? "Send" : "Save"}
        </button>
      </div>
    </article>
  );
}
