// What the programs in JavaScript share: rows are functions, and `main` runs them.

export const URL_OF_SERVER = process.env.GENSERVE_URL;
export const MODEL = process.env.GENSERVE_MODEL;

const rows = [];

/** The model's text is not what the client needs; the wire is as it should be. */
class TextFailure extends Error {}

/** Make a function a row, which works if it returns. `textErrors` are names of errors about the text. */
export function row(name, run, { textErrors = [] } = {}) {
  rows.push({ name, run, textErrors });
}

/** Fail the row unless the wire is as it should be. */
export function expect(condition, detail) {
  if (!condition) throw new Error(detail);
}

/** Fail the row for the model's text, unless it is as it should be. */
export function expectText(condition, detail) {
  if (!condition) throw new TextFailure(detail);
}

/** Run the rows and print them. */
export async function main() {
  for (const { name, run, textErrors } of rows) {
    const begun = performance.now();
    const result = { row: name, ok: true, detail: "" };
    try {
      result.detail = (await run()) ?? "";
    } catch (error) {
      console.error(error);
      Object.assign(result, { ok: false, detail: `${error.name}: ${error.message}`.slice(0, 600) });
      if (error instanceof TextFailure || textErrors.includes(error.name)) result.cause = "text";
    }
    result.seconds = Math.round((performance.now() - begun) / 10) / 100;
    console.log(`\n${JSON.stringify(result)}`); // the client may have begun a line
  }
  process.exit(0); // connections that a client keeps open do not matter
}
