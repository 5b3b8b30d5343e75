// The tool calls of an answer, and the form for their results.

import { useState } from "preact/hooks";
import { sendResults } from "../answering";
import type { ToolCall } from "../conversation";
import { Code } from "../markdown";

interface ToolCallsProps {
  calls: ToolCall[];
  isPending: boolean; // nothing follows: the calls wait for their results
}

export function ToolCalls({ calls, isPending }: ToolCallsProps) {
  const [results, setResults] = useState<string[]>([]);
  const cards = calls.map((call, index) => (
    <div class="tool-card" key={call.id || index}>
      <div class="tool-name">
        Calls <code>{call.function.name}</code>
      </div>
      <Code text={indented(call.function.arguments)} language="json" />
      {isPending && (
        <textarea
          rows={2}
          placeholder="Type or paste what the tool returns"
          aria-label={`Result of ${call.function.name}`}
          value={results[index] ?? ""}
          onInput={(event) => setResults(Object.assign([...results], { [index]: event.currentTarget.value }))}
        />
      )}
    </div>
  ));
  if (!isPending) return <>{cards}</>;
  const isComplete = calls.every((_call, index) => results[index]?.trim());
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        sendResults(calls, results);
      }}
    >
      {cards}
      <button type="submit" class="primary" disabled={!isComplete}>
        {calls.length > 1 ? "Send results" : "Send result"}
      </button>
    </form>
  );
}

function indented(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still being written
  }
}
