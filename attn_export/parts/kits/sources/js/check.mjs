/** Self-test: run and judge every case of a bundle, then the replay. */

import { BundleError, readCase } from './bundle.mjs';
import { fromGraph, toGraph } from './cache_layout.mjs';
import { judge } from './judge.mjs';
import { replay } from './replay.mjs';
import { oneLine } from './text.mjs';

/**
 * @typedef {import('./bundle.mjs').Bundle} Bundle
 *
 * @typedef {object} Result
 * @property {string} name  The name of the case.
 * @property {string} about  The purpose of the case.
 * @property {"passed" | "failed" | "unusable"} status
 * @property {number} share  The largest error, divided by the tolerance.
 * @property {string} why  The reason that it failed or is not compared, or "".
 * @property {number[]} ignored  Batch elements that were not compared.
 * @property {number} milliseconds  The time of the run.
 * @property {import('./dtypes.mjs').Tensors} outputs  The outputs of the engine.
 */

/**
 * Run and judge all cases; yield a result for each.
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

/** The number of results that `check` yields. */
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
