/** The self-test: every case of a bundle through one loaded graph, then the replay. */

import { BundleError, readCase } from './bundle.mjs';
import { fromGraph, toGraph } from './cache_layout.mjs';
import { judge } from './judge.mjs';
import { replay } from './replay.mjs';
import { oneLine } from './text.mjs';

/**
 * @typedef {import('./bundle.mjs').Bundle} Bundle
 *
 * @typedef {object} Result
 * @property {string} name  Of the case.
 * @property {string} about  What it shows.
 * @property {"passed" | "failed" | "unusable"} status
 * @property {number} share  The largest error as a share of what is allowed.
 * @property {string} why  Why it failed or is no evidence; "" where it passed.
 * @property {number[]} ignored  Rows of the batch that were not compared.
 * @property {number} milliseconds  Of the run alone.
 * @property {import('./dtypes.mjs').Tensors} outputs  What the engine gave.
 */

/**
 * Run and judge, one result after the other.
 * @param {import('./model.mjs').Model} model
 * @param {Bundle} bundle
 * @returns {AsyncGenerator<Result>}
 * @throws {BundleError} If the bundle is damaged.
 */
export async function* check(model, bundle) {
  const bound = bundle.cache === 'in-place' ? bundle.graph.bound : {};
  for (const entry of bundle.cases) {
    yield checkCase(bundle, entry, entry.name, entry.about, async (inputs) =>
      fromGraph(bundle, await model.run(toGraph(bundle, inputs), bound)),
    );
  }
  if (bundle.replay === null) return;
  const entry = bundle.cases.find(({ name }) => name === bundle.replay);
  if (!entry) throw new BundleError(`there is no case ${bundle.replay} to replay`);
  const about = `token by token, ${entry.sizes.query_len} of them, the cache fed back`;
  yield checkCase(bundle, entry, `replay of ${entry.name}`, about, (inputs, sizes) =>
    replay(model, bundle, sizes, inputs),
  );
}

/** How many results `check` gives. */
export const countOf = (/** @type {Bundle} */ bundle) =>
  bundle.cases.length + (bundle.replay === null ? 0 : 1);

async function checkCase(bundle, entry, name, about, run) {
  const { inputs, expected, sizes } = await readCase(bundle, entry);
  const ignored = entry.ignored_rows;
  const result = { name, about, status: 'failed', share: NaN, ignored, outputs: {} };
  const started = performance.now();
  try {
    result.outputs = await run(inputs, sizes);
  } catch (error) {
    const milliseconds = performance.now() - started;
    return { ...result, milliseconds, why: `the engine: ${oneLine(error)}` };
  }
  const milliseconds = performance.now() - started;
  const { status, share, problems, unusable } = judge(expected, result.outputs, entry);
  const why = (status === 'failed' ? problems : unusable).join('; ');
  return { ...result, milliseconds, status, share, why };
}
