// The control of one field of a request, made from its schema.

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Markdown } from "../markdown";
import { PARAM_TEXTS } from "../param_texts";
import type { Field } from "../schema";
import { changeSetup, conversation, defaultOf } from "../state";

const SLIDER_BOUND = 2; // a slider ends here, though the field may accept more

export function FieldControl({ field }: { field: Field }) {
  const { params } = conversation.value;
  const { name } = field;
  const value = params[name];
  const set = (changed: unknown) => {
    const { [name]: _old, ...others } = params;
    changeSetup({ params: changed === undefined ? others : { ...others, [name]: changed } });
  };
  const id = `field-${name}`;
  const text = PARAM_TEXTS[name] ?? field.description;
  return (
    <div class={`field ${value === undefined ? "" : "is-set"}`}>
      <div class="field-head">
        <label for={id}>{name}</label>
        <span class="faint range">{usualRange(field)}</span>
        {value === undefined ? (
          <Default field={field} />
        ) : (
          <button type="button" class="small" onClick={() => set(undefined)} aria-label={`Reset ${name}`}>
            Reset
          </button>
        )}
      </div>
      <Control id={id} field={field} value={value} onChange={set} />
      {isOutside(field, value) && <p class="problem">Outside the server's range: {field.range}.</p>}
      {text && (
        <div class="faint description" title={text === field.description ? undefined : field.description}>
          <Markdown text={text} />
        </div>
      )}
    </div>
  );
}

/** The range of the slider, and the server's limit if that is higher: few need it. */
function usualRange({ kind, minimum, maximum = 0, range }: Field): string {
  if (kind !== "number" || minimum === undefined || maximum <= SLIDER_BOUND) return range;
  return `${minimum} to ${SLIDER_BOUND}, at most ${maximum}`;
}

function isOutside(field: Field, value: unknown): boolean {
  return typeof value === "number" && !field.allows(value);
}

function Default({ field }: { field: Field }) {
  const { value, isOfModel } = defaultOf(conversation.value, field);
  if (value === undefined) return null;
  return (
    <span class="faint" title={isOfModel ? "As the model recommends" : undefined}>
      {isOfModel ? "model's" : "default"} {JSON.stringify(value)}
    </span>
  );
}

interface ControlProps {
  id: string;
  field: Field;
  value: unknown; // undefined: not set
  onChange: (value: unknown) => void;
}

function Control(props: ControlProps): ComponentChildren {
  const { id, field, value, onChange } = props;
  switch (field.kind) {
    case "number":
    case "integer":
      return <NumberControl {...props} />;
    case "boolean":
      return <Choice id={id} choices={[true, false]} value={value} onChange={onChange} />;
    case "choice":
      return <Choice id={id} choices={field.choices} value={value} onChange={onChange} />;
    default:
      return <TextControl {...props} />;
  }
}

function NumberControl({ id, field, value, onChange }: ControlProps) {
  const { minimum, maximum, kind } = field;
  const isInteger = kind === "integer";
  const otherwise = defaultOf(conversation.value, field).value;
  const hasSlider = !isInteger && minimum !== undefined;
  const [low, high] = [
    Math.max(minimum ?? 0, -SLIDER_BOUND),
    Math.min(maximum ?? SLIDER_BOUND, SLIDER_BOUND),
  ];
  const read = (text: string) => {
    const number = Number(text);
    onChange(text.trim() === "" || Number.isNaN(number) ? undefined : number);
  };
  return (
    <div class="number">
      {hasSlider && (
        <input
          type="range"
          aria-label={`${field.name}, slider`}
          min={low}
          max={high}
          step={(high - low) / 100}
          value={Number(value ?? otherwise ?? low)}
          onInput={(event) => read(event.currentTarget.value)}
        />
      )}
      <input
        id={id}
        type="number"
        min={minimum}
        max={maximum}
        step={isInteger ? 1 : "any"}
        placeholder={otherwise === undefined ? "not set" : String(otherwise)}
        aria-invalid={isOutside(field, value)}
        value={value === undefined ? "" : Number(value)}
        onInput={(event) => read(event.currentTarget.value)}
      />
    </div>
  );
}

function Choice({ id, choices, value, onChange }: Omit<ControlProps, "field"> & { choices: unknown[] }) {
  const at = choices.indexOf(value);
  return (
    <select id={id} value={at} onChange={(event) => onChange(choices[Number(event.currentTarget.value)])}>
      <option value={-1}>not set</option>
      {choices.map((choice, index) => (
        <option key={String(choice)} value={index}>
          {String(choice)}
        </option>
      ))}
    </select>
  );
}

const PLACEHOLDERS: Record<string, string> = { texts: "one text per line", text: "", json: "JSON" };

/** A field that is typed: a text, texts in lines, or JSON, which counts once it is valid. */
function TextControl({ id, field, value, onChange }: ControlProps) {
  const [typed, setTyped] = useState<string | null>(null);
  const [isInvalid, setIsInvalid] = useState(false);
  const onInput = (text: string) => {
    setTyped(text);
    try {
      onChange(read(text, field));
      setIsInvalid(false);
    } catch {
      setIsInvalid(true);
    }
  };
  return (
    <>
      <textarea
        id={id}
        rows={1}
        spellcheck={false}
        placeholder={PLACEHOLDERS[field.kind]}
        aria-invalid={isInvalid}
        value={value === undefined && !isInvalid ? "" : (typed ?? written(value, field))}
        onInput={(event) => onInput(event.currentTarget.value)}
      />
      {isInvalid && <p class="problem">This is not valid JSON: requests keep the last valid value.</p>}
    </>
  );
}

function read(text: string, field: Field): unknown {
  if (!text.trim()) return undefined;
  if (field.kind === "text") return text;
  if (field.kind === "json") return JSON.parse(text);
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replaceAll("\\n", "\n"));
}

function written(value: unknown, field: Field): string {
  if (field.kind === "texts")
    return (value as string[]).map((line) => line.replaceAll("\n", "\\n")).join("\n");
  return field.kind === "text" ? String(value) : JSON.stringify(value);
}
