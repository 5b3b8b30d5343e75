// The server's metrics, read from Prometheus' text format.

/** The numbers of one model, or the sum of several. */
export class Values {
  /** By name, summed over all labels but the model's; and by `name/value` of each other label. */
  readonly numbers = new Map<string, number>();
  /** Of histograms: by name, the cumulative counts by upper bound, in order. */
  readonly buckets = new Map<string, Map<number, number>>();

  get(name: string): number {
    return this.numbers.get(name) ?? 0;
  }

  add(name: string, labels: Map<string, string>, value: number): void {
    const bound = labels.get("le");
    if (bound !== undefined && name.endsWith("_bucket")) {
      this.addBucket(name.slice(0, -"_bucket".length), bound === "+Inf" ? Infinity : Number(bound), value);
      return;
    }
    this.addNumber(name, value);
    for (const [label, text] of labels) if (!UNSPLIT.has(label)) this.addNumber(`${name}/${text}`, value);
  }

  /** Add the numbers of another model. Of shares, which have no sum, the largest counts. */
  merge(other: Values): void {
    for (const [name, value] of other.numbers) {
      if (name.endsWith("_perc")) this.numbers.set(name, Math.max(this.get(name), value));
      else this.addNumber(name, value);
    }
    for (const [name, buckets] of other.buckets) {
      for (const [bound, count] of buckets) this.addBucket(name, bound, count);
    }
  }

  private addNumber(name: string, value: number): void {
    this.numbers.set(name, this.get(name) + value);
  }

  private addBucket(name: string, bound: number, count: number): void {
    let buckets = this.buckets.get(name);
    if (!buckets) this.buckets.set(name, (buckets = new Map()));
    buckets.set(bound, (buckets.get(bound) ?? 0) + count);
  }
}

const UNSPLIT = new Set(["model", "version"]);
const LINE = /^((?:genserve|nv_inference)_\w+)\{(.*)\} (\S+)$/gm;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES: Record<string, string> = { "\\n": "\n", '\\"': '"', "\\\\": "\\" };

/** Read the metrics of each model. */
export function readMetrics(text: string): Map<string, Values> {
  const models = new Map<string, Values>();
  for (const [, name = "", written = "", value] of text.matchAll(LINE)) {
    if (name.endsWith("_created")) continue;
    const labels = new Map<string, string>();
    for (const [, label = "", quoted = ""] of written.matchAll(LABEL)) {
      labels.set(
        label,
        quoted.replace(/\\[n"\\]/g, (pair) => ESCAPES[pair] ?? pair),
      );
    }
    const model = labels.get("model");
    if (model === undefined) continue;
    let values = models.get(model);
    if (!values) models.set(model, (values = new Values()));
    values.add(name, labels, Number(value));
  }
  return models;
}
