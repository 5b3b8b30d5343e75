// How long the parts of an answer took, where its prompt left the prefix cache, and whether it can be repeated.

import { useEffect, useRef, useState } from "preact/hooks";
import { type Replay, replay } from "../answering";
import type { CacheMatch, Message, Stats, Timings } from "../conversation";
import { isBusy } from "../state";

export function TimingPanel({ message, id }: { message: Message; id: string }) {
  const { stats } = message;
  if (!stats) return null;
  const { timings, cacheMatch } = stats;
  return (
    <section class="timing" id={id} aria-label="Timing of this answer">
      {timings ? (
        <Parts timings={timings} firstTokenMs={stats.firstTokenMs} />
      ) : (
        <p>The server sends its times with the end of an answer, which this one does not have.</p>
      )}
      {timings && <p>{endingOf(message)}</p>}
      {cacheMatch && <Cache match={cacheMatch} stats={stats} />}
      {message.finish && <Again message={message} />}
    </section>
  );
}

/** The parts as a bar and as a table. */
function Parts({ timings, firstTokenMs }: { timings: Timings; firstTokenMs: number }) {
  const { queue_ms, prompt_ms, prompt_n, cache_n, predicted_ms, predicted_n, draft_n, draft_n_accepted } =
    timings;
  const rows: [kind: string, name: string, ms: number, about: string][] = [
    ["wait", "Waited", queue_ms, "until the engine began"],
    [
      "read",
      "Read the prompt",
      prompt_ms,
      `${tokens(prompt_n)} computed, ${rate(prompt_n, prompt_ms)}; ${tokens(cache_n)} from the prefix cache`,
    ],
    [
      "write",
      "Wrote the answer",
      predicted_ms,
      `${tokens(predicted_n)}, ${rate(predicted_n - 1, predicted_ms)}` +
        (draft_n ? `; ${draft_n_accepted} of ${draft_n} drafted tokens accepted` : ""),
    ],
  ];
  const way = firstTokenMs - queue_ms - prompt_ms;
  return (
    <>
      <div class="timing-bar" aria-hidden="true">
        {rows.map(([kind, _name, ms]) => (
          <i key={kind} class={kind} style={{ flexGrow: ms }} />
        ))}
      </div>
      <table>
        <tbody>
          {rows.map(([kind, name, ms, about]) => (
            <tr key={kind}>
              <th scope="row">
                <i class={kind} aria-hidden="true" />
                {name}
              </th>
              <td>{time(ms)}</td>
              <td>{about}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {way > 50 && (
        <p>The first token needed {time(way)} more to this page: the network, or a busy computer.</p>
      )}
    </>
  );
}

function endingOf({ finish, stopReason, request }: Message): string {
  const limit = request?.fields.max_tokens ?? request?.fields.max_completion_tokens;
  switch (finish) {
    case "stop":
      return stopReason
        ? `It ended at the stop text or token ${JSON.stringify(stopReason)}.`
        : "The model ended it.";
    case "length":
      if (stopReason === "deadline") return "It ended because its time limit, max_time_ms, had passed.";
      return limit
        ? `It ended at its limit of ${limit} tokens, max_tokens, or with the context.`
        : "It ended because the context of the model is full.";
    case "repetition":
      return "It was stopped because it repeated itself: the setting is repetition_detection.";
    case "tool_calls":
      return "It ended with the call of a tool.";
    default:
      return "It was stopped before its end.";
  }
}

function Cache({ match, stats }: { match: CacheMatch; stats: Stats }) {
  const { promptTokens = 0, cachedTokens = 0 } = stats;
  const { matched_n, end, prompt, cached } = match;
  if (end === "off") return <p>The prefix cache was not read for this answer.</p>;
  if (end === "complete") return <p>All of the prompt was cached; its last token is always computed.</p>;
  if (!matched_n && end === "unknown") return <p>Nothing of the prompt was in the prefix cache.</p>;
  const same = `The first ${matched_n} of the prompt's ${tokens(promptTokens)} were cached`;
  const unused = matched_n - cachedTokens;
  const used = unused > 0 ? `, ${cachedTokens} of them in whole blocks, which were used` : "";
  return (
    <>
      <p>
        {same}
        {used}.{" "}
        {end === "unknown"
          ? "Nothing that goes on like this was cached, or it was evicted."
          : cached
            ? "There it differs from the nearest prompt in the cache:"
            : "There it differs from the prompts in the cache, which are not yours to see."}
      </p>
      {cached && prompt && (
        <table class="differs">
          <tbody>
            <tr>
              <th scope="row">This prompt</th>
              <td>
                <code>{visible(prompt.text)}</code>
              </td>
            </tr>
            <tr>
              <th scope="row">The cached one</th>
              <td>
                <code>{visible(cached.text)}</code>
              </td>
            </tr>
          </tbody>
        </table>
      )}
    </>
  );
}

/** The button that asks for the same answer again, and how that went. */
function Again({ message }: { message: Message }) {
  const [result, setResult] = useState("");
  const [runs, setRuns] = useState(false);
  const stopper = useRef<AbortController>(null);
  useEffect(() => () => stopper.current?.abort(), []);
  const fields = message.request?.fields;
  const isSampled = fields?.temperature !== 0;
  if (!fields || (isSampled && fields.seed === undefined)) {
    return <p>It cannot be replayed: its seed was not kept.</p>;
  }
  const run = async () => {
    stopper.current = new AbortController();
    setRuns(true);
    setResult("Replaying…");
    try {
      setResult(outcome(await replay(message, stopper.current.signal)));
    } catch (error) {
      setResult((error as Error).message);
    }
    setRuns(false);
  };
  return (
    <p class="replay">
      <button type="button" disabled={runs || isBusy.value} onClick={run}>
        Replay
      </button>
      <span role="status">
        {result ||
          (isSampled
            ? `Ask again with the same seed, ${fields.seed}, and compare.`
            : "Ask again, and compare.")}
      </span>
    </p>
  );
}

function outcome({ numSame, numCompared, isExact }: Replay): string {
  if (numSame === numCompared && isExact) {
    return `The same bits: all ${tokens(numCompared)}, and their probabilities to the last digit.`;
  }
  if (numSame === numCompared) return "The same text.";
  return `Another answer from token ${numSame + 1} on: the model, its settings or the server changed since.`;
}

function tokens(count: number): string {
  return `${count.toLocaleString("en")} token${count === 1 ? "" : "s"}`;
}

function time(ms: number): string {
  if (ms >= 9950) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}

function rate(count: number, ms: number): string {
  return count > 0 && ms > 0 ? `${((1000 * count) / ms).toFixed(1)} tokens/s` : "at once";
}

function visible(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}
