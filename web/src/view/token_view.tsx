// The tokens of an answer, coloured by probability.

import { useRef, useState } from "preact/hooks";
import type { Message, Token } from "../conversation";
import { linkTo } from "../links";
import { CopyButton } from "../markdown";
import { isSilent } from "../token_names";
import { Alternatives, percent } from "./alternatives";

// From the surest colour to the least sure, by the least probability of each.
const LEVELS = [0.9, 0.6, 0.3, 0.1, 0.02, 0];

export function TokenView({ message, tokens }: { message: Message; tokens: Token[] }) {
  const [selected, setSelected] = useState<number | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const focusToken = (index: number) => {
    const next = box.current?.querySelectorAll<HTMLElement>(".token")[index];
    next?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const at = Number((event.target as HTMLElement).dataset.index);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (step === undefined || Number.isNaN(at)) return;
    event.preventDefault();
    focusToken(Math.max(0, Math.min(tokens.length - 1, at + step)));
  };
  const close = () => {
    if (selected !== null) focusToken(selected);
    setSelected(null);
  };
  const token = selected === null ? undefined : tokens[selected];
  return (
    <div class="token-view">
      <div
        class="tokens"
        ref={box}
        role="group"
        aria-label="Tokens; arrows move, Enter shows alternatives"
        onKeyDown={onKeyDown}
      >
        {tokens.map((one, index) => (
          <TokenButton
            key={index}
            token={one}
            index={index}
            isSelected={index === selected}
            isEntry={index === (selected ?? 0)}
            isLast={index === tokens.length - 1 && message.finish === "stop"}
            onSelect={() => setSelected(index === selected ? null : index)}
          />
        ))}
        {selected !== null && token && (
          <Alternatives message={message} token={token} index={selected} box={box} onClose={close} />
        )}
      </div>
      <Legend tokens={tokens} link={linkTo(message)} />
    </div>
  );
}

interface TokenButtonProps {
  token: Token;
  index: number;
  isSelected: boolean;
  isEntry: boolean; // the one that Tab reaches
  isLast: boolean; // it ended the answer
  onSelect: () => void;
}

function TokenButton({ token, index, isSelected, isEntry, isLast, onSelect }: TokenButtonProps) {
  const text = isSilent(token.text) ? "" : token.text;
  const classes = ["token", `level-${levelOf(token.logprob)}`];
  if (token.chosen) classes.push("chosen");
  if (!text) classes.push("silent");
  if (text.startsWith("\n")) classes.push("breaks");
  // Spans, since the text of buttons does not wrap.
  return (
    <span
      class={classes.join(" ")}
      role="button"
      tabIndex={isEntry ? 0 : -1}
      data-index={index}
      aria-expanded={isSelected}
      aria-haspopup="dialog"
      title={`${percent(token.logprob)}${token.chosen ? ", your choice" : ""}`}
      onClick={onSelect}
      onKeyDown={(event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        onSelect();
      }}
    >
      {text || (isLast ? "end" : "·")}
    </span>
  );
}

/** What the colours mean, and how sure the model was on the whole. */
function Legend({ tokens, link }: { tokens: Token[]; link: string }) {
  const known = tokens.map(({ logprob }) => logprob).filter((logprob) => logprob !== null);
  const mean = known.reduce((sum, logprob) => sum + logprob, 0) / (known.length || 1);
  const perplexity = Math.exp(-mean);
  return (
    <div class="legend">
      {LEVELS.slice(0, -1).map((least, level) => (
        <span key={least} class={`level-${level}`}>
          ≥ {least * 100} %
        </span>
      ))}
      <span class={`level-${LEVELS.length - 1}`}>less</span>
      {known.length > 0 && (
        <span class="faint" title="The exponential of the mean negative log-probability of its tokens">
          perplexity {perplexity.toFixed(perplexity < 10 ? 2 : 0)}
        </span>
      )}
      <CopyButton text={link} label="Copy link" title="A link to these probabilities, for this browser" />
    </div>
  );
}

function levelOf(logprob: number | null): number | "unknown" {
  return logprob === null ? "unknown" : LEVELS.findIndex((least) => Math.exp(logprob) >= least);
}
