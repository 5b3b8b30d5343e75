// The plots: which metrics each shows.

import type { Values } from "./metrics";

/** Computes a number from the metrics of now and of before, which are some seconds apart. */
type Measure = (now: Values, before: Values, seconds: number) => number | null;

export type Unit = "count" | "per second" | "seconds" | "share";

export interface Line {
  label: string;
  measure: Measure;
  isGauge?: boolean; // it needs no `before`
}

export interface Panel {
  title: string;
  note: string;
  unit: Unit;
  lines: Line[];
  needs: string; // the metric without which a model has no such plot
  isOptional?: boolean; // it is hidden while that metric is 0
}

const gauge =
  (name: string): Measure =>
  (now) =>
    now.get(name);

const rate =
  (...names: string[]): Measure =>
  (now, before, seconds) =>
    added(now, before, ...names) / seconds;

/** What some counters have added, for each that another has. */
const ratio =
  (names: string[], per: string, scale = 1): Measure =>
  (now, before) => {
    const count = added(now, before, per);
    return count > 0 ? (added(now, before, ...names) * scale) / count : null;
  };

/** A percentile of what a histogram has counted, by interpolation in its bucket as in Prometheus. */
const percentile =
  (name: string, share: number): Measure =>
  (now, before) => {
    const old = before.buckets.get(name);
    const buckets = [...(now.buckets.get(name) ?? [])].map(
      ([bound, count]) => [bound, count - (old?.get(bound) ?? 0)] as const,
    );
    const rank = share * (buckets.at(-1)?.[1] ?? 0);
    if (!(rank > 0)) return null;
    let [low, below] = [0, 0];
    for (const [bound, count] of buckets) {
      if (count >= rank)
        return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (count - below);
      [low, below] = [bound, count];
    }
    return null;
  };

function added(now: Values, before: Values, ...names: string[]): number {
  return names.reduce((sum, name) => sum + now.get(name) - before.get(name), 0);
}

const percentiles = (name: string): Line[] =>
  [0.5, 0.9, 0.99].map((share) => ({ label: `p${share * 100}`, measure: percentile(name, share) }));

const REQUESTS = "genserve_requests_total";
const UNFINISHED = [`${REQUESTS}/abort`, `${REQUESTS}/error`];

export const PANELS: Panel[] = [
  {
    title: "Throughput",
    note: "Tokens generated, and prompt tokens computed",
    unit: "per second",
    needs: "genserve_generation_tokens_total",
    lines: [
      { label: "generated", measure: rate("genserve_generation_tokens_total") },
      { label: "prompt", measure: rate("genserve_prompt_tokens_total") },
    ],
  },
  {
    title: "Requests",
    note: "Requests that run, and requests that wait to be scheduled",
    unit: "count",
    needs: "genserve_num_requests_running",
    lines: [
      { label: "running", measure: gauge("genserve_num_requests_running"), isGauge: true },
      { label: "waiting", measure: gauge("genserve_num_requests_waiting"), isGauge: true },
    ],
  },
  {
    title: "Time to first token",
    note: "From arrival to the first token",
    unit: "seconds",
    needs: "genserve_time_to_first_token_seconds_count",
    lines: percentiles("genserve_time_to_first_token_seconds"),
  },
  {
    title: "Time between tokens",
    note: "From one step with new tokens for a request to the next",
    unit: "seconds",
    needs: "genserve_inter_token_latency_seconds_count",
    lines: percentiles("genserve_inter_token_latency_seconds"),
  },
  {
    title: "Whole request",
    note: "From arrival to the last token",
    unit: "seconds",
    needs: "genserve_e2e_request_latency_seconds_count",
    lines: percentiles("genserve_e2e_request_latency_seconds"),
  },
  {
    title: "Time in the queue",
    note: "From arrival to the first step",
    unit: "seconds",
    needs: "genserve_request_queue_time_seconds_count",
    lines: percentiles("genserve_request_queue_time_seconds"),
  },
  {
    title: "Batch",
    note: "Mean number of tokens in a step, prompt tokens included",
    unit: "count",
    needs: "genserve_iteration_tokens_count",
    lines: [
      {
        label: "tokens per step",
        measure: ratio(["genserve_iteration_tokens_sum"], "genserve_iteration_tokens_count"),
      },
    ],
  },
  {
    title: "KV cache",
    note: "Share held by running requests; for all models, that of the fullest cache",
    unit: "share",
    needs: "genserve_kv_cache_usage_perc",
    lines: [{ label: "in use", measure: gauge("genserve_kv_cache_usage_perc"), isGauge: true }],
  },
  {
    title: "Prefix cache",
    note: "Share of the prompt tokens that were cached",
    unit: "share",
    needs: "genserve_prefix_cache_queries_total",
    lines: [
      {
        label: "hits",
        measure: ratio(["genserve_prefix_cache_hits_total"], "genserve_prefix_cache_queries_total"),
      },
    ],
  },
  {
    title: "Ended requests",
    note: "By their finish reason; rejected: with status 429",
    unit: "per second",
    needs: "genserve_requests_total",
    lines: [
      {
        label: "completed",
        measure: (now, before, seconds) =>
          (added(now, before, REQUESTS) - added(now, before, ...UNFINISHED)) / seconds,
      },
      { label: "cancelled", measure: rate(`${REQUESTS}/abort`) },
      { label: "failed", measure: rate(`${REQUESTS}/error`) },
      { label: "rejected", measure: rate("genserve_admission_rejections_total") },
    ],
  },
  {
    title: "Speculation",
    note: "Share of the drafted tokens that the model accepted",
    unit: "share",
    needs: "genserve_spec_decode_num_draft_tokens_total",
    isOptional: true,
    lines: [
      {
        label: "accepted",
        measure: ratio(
          ["genserve_spec_decode_num_accepted_tokens_total"],
          "genserve_spec_decode_num_draft_tokens_total",
        ),
      },
    ],
  },
  {
    title: "Preemptions",
    note: "Requests that lost their blocks of the KV cache and waited again",
    unit: "per second",
    needs: "genserve_num_preemptions_total",
    isOptional: true,
    lines: [{ label: "preempted", measure: rate("genserve_num_preemptions_total") }],
  },
];

const NV = "nv_inference_";

/** Of models that do not generate text. */
export const INFERENCE_PANELS: Panel[] = [
  {
    title: "Requests",
    note: "Inference requests per second",
    unit: "per second",
    needs: `${NV}request_success`,
    lines: [
      { label: "succeeded", measure: rate(`${NV}request_success`) },
      { label: "failed", measure: rate(`${NV}request_failure`) },
    ],
  },
  {
    title: "Queue",
    note: "Requests that wait for an instance",
    unit: "count",
    needs: `${NV}pending_request_count`,
    lines: [{ label: "waiting", measure: gauge(`${NV}pending_request_count`), isGauge: true }],
  },
  {
    title: "Time",
    note: "Mean time of a request, and its parts",
    unit: "seconds",
    needs: `${NV}request_duration_us`,
    lines: [
      { label: "whole", measure: ratio([`${NV}request_duration_us`], `${NV}request_success`, 1e-6) },
      { label: "queue", measure: ratio([`${NV}queue_duration_us`], `${NV}request_success`, 1e-6) },
      { label: "compute", measure: ratio([`${NV}compute_infer_duration_us`], `${NV}request_success`, 1e-6) },
    ],
  },
  {
    title: "Batch",
    note: "Mean number of inferences in an execution",
    unit: "count",
    needs: `${NV}exec_count`,
    lines: [{ label: "per execution", measure: ratio([`${NV}count`], `${NV}exec_count`) }],
  },
];
