// The settings of a conversation: system prompt, sampling, tools.

import { useState } from "preact/hooks";
import { InvalidInput, readTools, toolNames } from "../chat_request";
import { apiKey, asksProbabilities } from "../preferences";
import { changeSetup, connect, conversation, fields, settingsOpen } from "../state";
import { FieldControl } from "./field_control";
import { IconButton } from "./icons";

export function Settings() {
  return (
    <aside class="settings" aria-label="Settings">
      <div class="settings-top">
        <h2>Settings</h2>
        <IconButton
          icon="close"
          label="Close settings"
          keys="Alt+S"
          onClick={() => (settingsOpen.value = false)}
        />
      </div>
      <SystemPrompt />
      <Sampling />
      <Tools />
      <OtherFields />
      <Page />
    </aside>
  );
}

function SystemPrompt() {
  return (
    <section>
      <h3>
        <label for="system">System prompt</label>
      </h3>
      <textarea
        id="system"
        rows={3}
        placeholder="You are a helpful assistant."
        value={conversation.value.system}
        onInput={(event) => changeSetup({ system: event.currentTarget.value })}
      />
    </section>
  );
}

function Sampling() {
  const common = fields.value.filter((field) => field.isCommon);
  const numChanged = Object.keys(conversation.value.params).length;
  return (
    <section>
      <h3>
        Sampling
        {numChanged > 0 && (
          <button type="button" class="small" onClick={() => changeSetup({ params: {} })}>
            Reset all {numChanged}
          </button>
        )}
      </h3>
      {common.map((field) => (
        <FieldControl key={field.name} field={field} />
      ))}
    </section>
  );
}

function OtherFields() {
  const [filter, setFilter] = useState("");
  const others = fields.value.filter((field) => !field.isCommon);
  const found = others.filter(({ name, description }) =>
    `${name} ${description}`.toLowerCase().includes(filter),
  );
  const numSet = others.filter(({ name }) => name in conversation.value.params).length;
  if (!others.length) return null;
  return (
    <details>
      <summary>
        {others.length} more fields{numSet > 0 && `, ${numSet} set`}
      </summary>
      <input
        type="search"
        placeholder="Search fields"
        aria-label="Search fields"
        value={filter}
        onInput={(event) => setFilter(event.currentTarget.value.toLowerCase())}
      />
      {sections(found).map(([section, members]) => (
        <div key={section}>
          {section && <h4>{section}</h4>}
          {members.map((field) => (
            <FieldControl key={field.name} field={field} />
          ))}
        </div>
      ))}
    </details>
  );
}

function sections(list: typeof fields.value): [string, typeof fields.value][] {
  const names = [...new Set(list.map(({ section }) => section))];
  return names.map((name) => [name, list.filter(({ section }) => section === name)]);
}

const EXAMPLE = JSON.stringify(
  [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "Get the current weather of a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
  null,
  2,
);

function Tools() {
  const { tools, toolChoice } = conversation.value;
  const names = toolNames(tools);
  return (
    <section>
      <h3>
        <label for="tools">Tools</label>
        {!tools.trim() && (
          <button type="button" class="small" onClick={() => changeSetup({ tools: EXAMPLE })}>
            Example
          </button>
        )}
      </h3>
      <textarea
        id="tools"
        class="mono"
        rows={tools.trim() ? 10 : 2}
        spellcheck={false}
        placeholder="A JSON list of functions, as in OpenAI's field tools"
        value={tools}
        aria-invalid={problemOf(tools) !== ""}
        onInput={(event) => changeSetup({ tools: event.currentTarget.value })}
      />
      {problemOf(tools) && <p class="problem">{problemOf(tools)}</p>}
      {names.length > 0 && (
        <label class="row">
          Choice
          <select
            value={toolChoice}
            onChange={(event) => changeSetup({ toolChoice: event.currentTarget.value })}
          >
            <option value="auto">auto: the model decides</option>
            <option value="required">required: one at least</option>
            <option value="none">none</option>
            {names.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
      )}
    </section>
  );
}

function problemOf(tools: string): string {
  try {
    readTools(tools);
    return "";
  } catch (error) {
    return error instanceof InvalidInput ? error.message : String(error);
  }
}

function Page() {
  return (
    <section>
      <h3>This page</h3>
      <label class="row">
        <input
          type="checkbox"
          checked={asksProbabilities.value}
          onChange={(event) => (asksProbabilities.value = event.currentTarget.checked)}
        />
        Ask for token probabilities
      </label>
      <form onSubmit={(event) => event.preventDefault()}>
        <label class="stack">
          API key
          <input
            type="password"
            autocomplete="off"
            value={apiKey.value}
            placeholder="if the server has one"
            onChange={(event) => {
              apiKey.value = event.currentTarget.value.trim();
              connect();
            }}
          />
        </label>
      </form>
      <p class="faint">The key and all conversations stay in this browser.</p>
    </section>
  );
}
