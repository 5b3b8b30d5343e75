// Text files and long pasted texts, which are sent with a message.

import type { TextFile } from "../conversation";
import { notice } from "../state";
import { IconButton } from "./icons";

const MAX_BYTES = 2_000_000;
const LONG_CHARS = 2000; // of a pasted text that becomes a file

export function size(text: string): string {
  const { length } = text;
  if (length < 1000) return `${length} character${length === 1 ? "" : "s"}`;
  return length < 1e6
    ? `${Math.round(length / 1000)}k characters`
    : `${(length / 1e6).toFixed(1)}M characters`;
}

/** Read files as texts; a notice names those that are none. */
export async function readFiles(files: Iterable<File>, taken: TextFile[]): Promise<TextFile[]> {
  const [read, problems]: [TextFile[], string[]] = [[], []];
  for (const file of files) {
    try {
      if (file.size > MAX_BYTES) throw new Error("is larger than 2 MB");
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error("is not a text file");
      read.push({ name: freeName(file.name, [...taken, ...read]), text: text.replaceAll("\r\n", "\n") });
    } catch (error) {
      const reason = error instanceof TypeError ? "is not a text file in UTF-8" : (error as Error).message;
      problems.push(`${file.name} ${reason}`);
    }
  }
  if (problems.length) notice.value = { text: `Not attached: ${problems.join("; ")}.` };
  return read;
}

/** A pasted text that is too long for the field, as a file. */
export function pastedFile(text: string, taken: TextFile[]): TextFile | null {
  return text.length < LONG_CHARS ? null : { name: freeName("pasted text", taken), text };
}

function freeName(name: string, taken: TextFile[]): string {
  const names = new Set(taken.map((file) => file.name));
  for (let number = 1; ; number++) {
    const candidate = number === 1 ? name : `${name} (${number})`;
    if (!names.has(candidate)) return candidate;
  }
}

interface ChipsProps {
  files: TextFile[];
  onRemove: (file: TextFile) => void;
}

/** The files of the next message. */
export function Chips({ files, onRemove }: ChipsProps) {
  if (!files.length) return null;
  return (
    <ul class="chips" aria-label="Attached texts">
      {files.map((file) => (
        <li key={file.name}>
          <span class="chip-name">{file.name}</span> <span class="faint">{size(file.text)}</span>
          <IconButton icon="close" label={`Remove ${file.name}`} onClick={() => onRemove(file)} />
        </li>
      ))}
    </ul>
  );
}
