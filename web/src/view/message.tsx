// One message of the shown branch, with its actions.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { answerNow, continueAnswer, regenerate, resend } from "../answering";
import { CONTEXT_FULL } from "../api";
import { childrenOf, type Message, UNFINISHED, withBranch } from "../conversation";
import { CopyButton, Markdown } from "../markdown";
import { showsProbabilities } from "../preferences";
import {
  change,
  conversation,
  deleteMessage,
  dialog,
  dialogSubject,
  isBusy,
  isUnloaded,
  models,
  readShares,
} from "../state";
import { size } from "./attachments";
import { ContextActions } from "./context";
import { IconButton } from "./icons";
import { TimingPanel } from "./timing";
import { TokenView } from "./token_view";
import { ToolCalls } from "./tool_calls";

interface MessageProps {
  message: Message;
  isLast: boolean;
}

export function MessageView({ message, isLast }: MessageProps) {
  const [edits, setEdits] = useState(false);
  const [showsTiming, setShowsTiming] = useState(false);
  if (edits) return <Editor message={message} onDone={() => setEdits(false)} />;
  const isWriting = isLast && isBusy.value && message.role === "assistant";
  return (
    <article
      id={`message-${message.id}`}
      class={`message ${message.role}`}
      tabIndex={-1}
      aria-label={LABELS[message.role]}
      aria-busy={isWriting}
    >
      {message.role === "assistant" ? (
        <Answer message={message} isWriting={isWriting} isLast={isLast} />
      ) : message.role === "tool" ? (
        <ToolResult message={message} />
      ) : (
        <UserMessage message={message} />
      )}
      <footer>
        {!isWriting && (
          <>
            <Branches message={message} />
            <Actions message={message} isLast={isLast} onEdit={() => setEdits(true)} />
          </>
        )}
        <Speed
          message={message}
          isWriting={isWriting}
          isOpen={showsTiming}
          onToggle={() => setShowsTiming(!showsTiming)}
        />
      </footer>
      {showsTiming && <TimingPanel message={message} id={`timing-${message.id}`} />}
    </article>
  );
}

function UserMessage({ message: { content, typed = content, files = [] } }: { message: Message }) {
  return (
    <>
      {files.map(({ name, text }) => (
        <details class="attachment" key={name}>
          <summary>
            {name} <span class="faint">{size(text)}</span>
          </summary>
          <pre tabIndex={0}>{text}</pre>
        </details>
      ))}
      {typed && <div class="bubble">{typed}</div>}
    </>
  );
}

const LABELS = { user: "You", assistant: "Assistant", tool: "Tool result" };

/** Stands for an answer without text; while a long prompt is read, with the share that was read. */
function Waiting({ message: { id, model = "" } }: { message: Message }) {
  const share = readShares.value[id] ?? 0;
  const loads = isUnloaded(model);
  return (
    <p class="waiting" role="status" aria-label={loads ? `Loading ${model}` : "Waiting for the first token"}>
      <i />
      <i />
      <i />
      {loads && <span class="faint">loading {model}</span>}
      {share > 0 && share < 1 && <span class="faint">reading the prompt {Math.round(100 * share)} %</span>}
    </p>
  );
}

interface AnswerProps extends MessageProps {
  isWriting: boolean;
}

function Answer({ message, isWriting, isLast }: AnswerProps) {
  const { content, reasoning, toolCalls, tokens, error, errorKind, finish } = message;
  const isEmpty = !content && !reasoning && !toolCalls?.length;
  return (
    <>
      {showsProbabilities.value && tokens?.length ? (
        <TokenView message={message} tokens={tokens} />
      ) : (
        <>
          {reasoning && <Reasoning message={message} text={reasoning} isOpen={isWriting && !content} />}
          {content && <Markdown text={content} />}
        </>
      )}
      {showsProbabilities.value && !tokens?.length && !isEmpty && !isWriting && (
        <p class="faint">This answer has no token probabilities: it was generated without them.</p>
      )}
      {toolCalls && toolCalls.length > 0 && (
        <ToolCalls calls={toolCalls} isPending={isLast && !isWriting && !error} />
      )}
      {isWriting && isEmpty && <Waiting message={message} />}
      {!isWriting && isEmpty && !error && (
        <p class="faint">
          {finish === UNFINISHED ? "No text of this answer has come." : "The answer is empty."}
        </p>
      )}
      {error && (
        <div class="error" role="alert">
          <p>{error}</p>
          {errorKind === CONTEXT_FULL ? (
            <ContextActions />
          ) : (
            <button type="button" onClick={() => regenerate(message)}>
              Try again
            </button>
          )}
        </div>
      )}
    </>
  );
}

/** The thought before an answer; open only while nothing else is there, unless the reader opened it. */
function Reasoning({ message, text, isOpen }: { message: Message; text: string; isOpen: boolean }) {
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
      {isOpen && (
        <button type="button" title="End the reasoning" onClick={() => answerNow(message)}>
          Answer now
        </button>
      )}
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
  const open = (name: "compare" | "raw") => {
    dialogSubject.value = message.id;
    dialog.value = name;
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
      {isAnswer && isLast && (
        <IconButton
          icon="columns"
          label="Compare with another answer"
          disabled={isBusy.value}
          onClick={() => open("compare")}
        />
      )}
      {isAnswer && <IconButton icon="code" label="Request as curl and Python" onClick={() => open("raw")} />}
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
  [UNFINISHED]: "not finished",
  length: "reached the limit of tokens",
  stopped: "stopped",
  repetition: "stopped, since it repeated itself",
};

interface SpeedProps {
  message: Message;
  isWriting: boolean;
  isOpen: boolean; // the panel with more about it is shown
  onToggle: () => void;
}

/** The speed of an answer, and how it ended; opens the panel with the rest. */
function Speed({ message, isWriting, isOpen, onToggle }: SpeedProps) {
  const text = useMemo(() => {
    const { stats, finish, error, ignored } = message;
    const rate = stats?.timings?.predicted_per_second || stats?.tokensPerSecond;
    const speed = rate && `${rate.toFixed(1)} tokens/s`;
    const parts = [
      stats && models.value.length > 1 && message.model,
      speed,
      stats && `first token ${Math.round(stats.firstTokenMs)} ms`,
      stats && `${stats.completionTokens} tokens`,
      !isWriting && !error && ENDINGS[finish ?? ""],
      ignored && `without effect: ${ignored}`,
    ];
    return parts.filter(Boolean).join(" · ");
  }, [message, isWriting, models.value.length]);
  if (!text) return null;
  if (!message.stats || isWriting) return <span class="speed">{text}</span>;
  return (
    <button
      type="button"
      class="small speed"
      title="Where the time went"
      aria-expanded={isOpen}
      aria-controls={`timing-${message.id}`}
      onClick={onToggle}
    >
      {text}
    </button>
  );
}

/** The form that changes a message, as another branch; a user's message is answered again. */
function Editor({ message, onDone }: { message: Message; onDone: () => void }) {
  const [text, setText] = useState(message.typed ?? message.content);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const isUser = message.role === "user";
  const done = () => {
    if (resend(message, text)) onDone();
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
        <button type="button" class="primary" disabled={!text.trim() && !message.files} onClick={done}>
          {isUser ? "Send" : "Save"}
        </button>
      </div>
    </article>
  );
}
